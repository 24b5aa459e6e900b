"""PPO with a built-in environment: rollouts, then epochs of minibatches, as in CleanRL.

torchrun --nproc-per-node 2 ppo.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

num_envs, num_steps, num_minibatches, update_epochs, gamma = 16, 32, 4, 4, 0.99


class Cart:
    """A cart on a line, to be pushed towards the middle; one row per environment."""

    def reset(self):
        self.state = torch.rand(num_envs, 2) - 0.5
        return self.state

    def step(self, action):
        position, speed = self.state.unbind(1)
        speed = speed + 0.1 * (action - 1.0) + 0.02 * torch.randn(num_envs)
        position = position + 0.1 * speed
        self.state = torch.stack([position, speed], 1)
        reward = 1.0 - position.abs()
        done = position.abs() > 2.0
        self.state[done] = torch.rand(int(done.sum()), 2) - 0.5
        return self.state, torch.where(done, torch.tensor(-10.0), reward), done.float()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x).flatten()


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
agent = Agent()
torch.manual_seed(2 + dist.get_rank())
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
envs = Cart()
next_obs, next_done = envs.reset(), torch.zeros(num_envs)
batch_size, per_iteration = num_envs * num_steps, update_epochs * num_minibatches
for _ in range(-(-int(os.environ.get("STEPS", "400")) // per_iteration)):
    rollout = []
    for _ in range(num_steps):
        obs, done = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
        next_obs, reward, next_done = envs.step(action)
        rollout.append((obs, action, logprob, reward, done, value))
    stacked = (torch.stack(column) for column in zip(*rollout, strict=True))
    b_obs, b_actions, b_logprobs, rewards, dones, values = stacked
    with torch.no_grad():
        returns, following = torch.zeros_like(rewards), agent.critic(next_obs).flatten()
        for t in reversed(range(num_steps)):
            ended = next_done if t == num_steps - 1 else dones[t + 1]
            returns[t] = following = rewards[t] + gamma * following * (1.0 - ended)
    columns = (b_obs, b_actions, b_logprobs, returns - values, returns)
    flat = [part.reshape(batch_size, *part.shape[2:]) for part in columns]
    for _ in range(update_epochs):
        for mb_inds in torch.randperm(batch_size).chunk(num_minibatches):
            x, a, old, advantage, target = (part[mb_inds] for part in flat)
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(x, a)
            ratio = (newlogprob - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * ((newvalue - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            for param in agent.parameters():  # averaged as in CleanRL's multi-GPU PPO
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
dist.destroy_process_group()
