"""Replay of a step with every operation watched: does the fault come back, and where does it start?"""
