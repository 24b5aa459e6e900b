/* A driver that calls the plugin as NCCL does, without a GPU: communicators, host threads that enqueue, a thread that
 * reports kernels, a proxy thread. Used in tests with sanitizers, for kills at random moments and for the benchmark.
 *
 *   nccl_driver LIBRARY VERSION THREADS CALLS MODE [CHANNELS]
 *
 * MODE `check` reports kernels from separate threads and aborts every third communicator midway. `time` makes all calls
 * of a communicator in one thread, and prints the elapsed nanoseconds, the CPU nanoseconds of these threads, and the
 * number of events. `endless` runs until it is killed; after each completed call of thread 0 it writes the number of
 * completed calls (8 bytes) to standard output.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nccl_interface.h" /* of probes/collectives/nccl_plugin */

enum { MAX_THREADS = 64, QUEUE = 1024, MAX_DRIVER_CHANNELS = 32 };

/* Both tables of functions agree from `start` on. */
static start_function start_event;
static stop_function stop_event;
static state_function record_state;
static int (*finalize_context)(void *);
static const void *table;
static int version, num_calls, num_threads, num_channels = 2;
static const char *mode;
static _Atomic long num_events, cpu_ns;

struct work { /* from the enqueuing thread to the one that reports kernels */
  void *context, *call;
};

struct rank_thread {
  pthread_t thread, reporter;
  int number;
  void *context;
  struct work queue[QUEUE];
  _Atomic long head, tail;
  _Atomic bool is_over;
};
static struct rank_thread threads[MAX_THREADS];

static int64_t now_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *begin_communicator(int number) {
  void *context = NULL;
  int mask = 0;
  char name[32];
  snprintf(name, sizeof name, "group_%d", number % 8);
  if (version <= 3)
    ((const struct profiler_v1 *)table)->init(&context, &mask);
  else if (version == 4)
    ((const struct profiler_v4 *)table)->init(&context, &mask, name, (uint64_t)number, 2, 8, number % 8, NULL);
  else
    ((const struct profiler_v5 *)table)->init(&context, (uint64_t)number, &mask, name, 2, 8, number % 8, NULL);
  return context;
}

static void *start_call(void *context, long seq) {
  void *handle = NULL;
  if (version == 1) {
    struct descriptor_v1 event = {.type = EVENT_COLL, .coll = {.seq = (uint64_t)seq, .function = 4, .count = 1024}};
    start_event(context, &handle, &event);
  } else if (version == 2) {
    struct descriptor_v2 event = {.type = EVENT_COLL,
                                  .coll = {.seq = (uint64_t)seq, .function = "AllReduce", .count = 1024,
                                           .dtype = "ncclFloat32", .algorithm = "RING", .protocol = "SIMPLE"}};
    start_event(context, &handle, &event);
  } else if (version == 3) {
    struct descriptor_v3 event = {.type = EVENT_COLL,
                                  .coll = {.seq = (uint64_t)seq, .function = "AllReduce", .count = 1024,
                                           .dtype = "ncclFloat32", .algorithm = "RING", .protocol = "SIMPLE"}};
    start_event(context, &handle, &event);
  } else {
    struct descriptor_v4 event = {.type = EVENT_COLL,
                                  .coll = {.seq = (uint64_t)seq, .function = "AllReduce", .count = 1024,
                                           .dtype = "ncclFloat32", .num_channels = (uint8_t)num_channels,
                                           .algorithm = "RING", .protocol = "SIMPLE"}};
    start_event(context, &handle, &event);
  }
  return handle;
}

static void report_kernel(void *context, void *call) {
  void *kernels[MAX_DRIVER_CHANNELS] = {NULL};
  if (version < 3) return;
  for (int channel = 0; channel < num_channels; channel++) {
    struct descriptor_v4 event = {.type = EVENT_KERNEL_CHANNEL, .parent = call,
                                  .kernel = {.channel = (uint8_t)channel, .gpu_ns = 1000}};
    start_event(context, &kernels[channel], &event);
  }
  for (int channel = 0; channel < num_channels; channel++) {
    union state_arguments_v4 arguments = {.kernel = {.gpu_ns = 1000u + (unsigned)channel}};
    if (kernels[channel] && version > 3) record_state(kernels[channel], STATE_KERNEL_CHANNEL_STOP, &arguments);
    if (kernels[channel]) stop_event(kernels[channel]);
  }
}

static void report_proxy(void *context, void *call, int peer) {
  void *op = NULL, *step = NULL;
  struct descriptor_v4 event = {.type = EVENT_PROXY_OP, .parent = call,
                                .proxy_op = {.pid = getpid(), .channel = (uint8_t)(peer % 4), .peer = peer,
                                             .num_steps = 2, .is_send = peer & 1}};
  start_event(context, &op, &event);
  if (!op) return;
  for (int number = 0; number < 2; number++) {
    struct descriptor_v4 part = {.type = EVENT_PROXY_STEP, .parent = op, .proxy_step = {.step = number}};
    union state_arguments_v4 arguments = {.proxy_step = {.bytes = 4096}};
    start_event(context, &step, &part);
    if (!step) break;
    record_state(step, STATE_STEP_SEND_WAIT, &arguments);
    stop_event(step);
  }
  stop_event(op);
}

/* Reports what was enqueued, as NCCL's own threads do: later, and from elsewhere. */
static void *report(void *argument) {
  struct rank_thread *self = argument;
  for (long done = 0;;) {
    if (done == atomic_load(&self->tail)) {
      if (atomic_load(&self->is_over) && done == atomic_load(&self->tail)) return NULL;
      sched_yield();
      continue;
    }
    struct work work = self->queue[done % QUEUE];
    if (done % 7) report_proxy(work.context, work.call, (int)(done % 8));
    report_kernel(work.context, work.call);
    atomic_store(&self->head, ++done);
  }
}

static void *check_thread(void *argument) {
  struct rank_thread *self = argument;
  void *context = begin_communicator(self->number);
  pthread_create(&self->reporter, NULL, report, self);
  for (long i = 0; i < num_calls; i++) {
    if (i % 1000 == 999) { /* a new communicator; every third is aborted while calls are in flight */
      bool is_aborted = i / 1000 % 3 == 0;
      while (!is_aborted && atomic_load(&self->head) < i) sched_yield();
      finalize_context(context);
      context = begin_communicator(self->number + (int)i);
    }
    while (i - atomic_load(&self->head) >= QUEUE) sched_yield();
    void *call = start_call(context, i);
    if (call) stop_event(call);
    self->queue[i % QUEUE] = (struct work){context, call};
    atomic_store(&self->tail, i + 1);
  }
  atomic_store(&self->is_over, true);
  pthread_join(self->reporter, NULL);
  finalize_context(context);
  return NULL;
}

static void *time_thread(void *argument) {
  struct rank_thread *self = argument;
  void *context = begin_communicator(self->number);
  int64_t begin = now_ns(CLOCK_THREAD_CPUTIME_ID);
  for (long i = 0; i < num_calls; i++) {
    void *call = start_call(context, i);
    if (call) stop_event(call);
    report_kernel(context, call);
  }
  atomic_fetch_add(&cpu_ns, now_ns(CLOCK_THREAD_CPUTIME_ID) - begin);
  atomic_fetch_add(&num_events, (long)num_calls * (2 + (version < 3 ? 0 : version < 4 ? 2 : 3) * num_channels));
  return NULL;
}

/* No rank of a training is further ahead of another than what NCCL holds in flight. */
static bool is_ahead(struct rank_thread *self, int64_t calls) {
  atomic_store(&self->tail, calls);
  for (int i = 0; i < num_threads; i++)
    if (atomic_load(&threads[i].tail) + QUEUE < calls) return true;
  return false;
}

static void *endless_thread(void *argument) {
  struct rank_thread *self = argument;
  void *context = begin_communicator(self->number);
  for (int64_t i = 0;; i++) {
    while (is_ahead(self, i)) sched_yield();
    void *call = start_call(context, i);
    if (call) stop_event(call);
    report_kernel(context, call);
    int64_t completed = i + 1;
    if (!self->number && write(STDOUT_FILENO, &completed, sizeof completed) != sizeof completed) return NULL;
  }
}

static bool load(const char *library) {
  char symbol[32];
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) fprintf(stderr, "%s\n", dlerror());
  if (!handle || version < 1) return false;
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
  table = dlsym(handle, symbol);
  if (!table) return false;
  const struct profiler_v1 *functions = table; /* those after `init` lie at the same places in all versions */
  start_event = functions->start;
  stop_event = functions->stop;
  record_state = functions->state;
  finalize_context = functions->finalize;
  return true;
}

int main(int count, char **words) {
  if (count < 6) return 2;
  version = atoi(words[2]);
  num_threads = atoi(words[3]);
  num_calls = atoi(words[4]);
  mode = words[5];
  if (count > 6) num_channels = atoi(words[6]);
  if (num_threads < 1 || num_threads > MAX_THREADS || num_channels > MAX_DRIVER_CHANNELS || !load(words[1])) return 2;
  void *(*body)(void *) = !strcmp(mode, "time") ? time_thread : !strcmp(mode, "check") ? check_thread : endless_thread;
  int64_t begin = now_ns(CLOCK_MONOTONIC);
  for (int i = 0; i < num_threads; i++) {
    threads[i].number = i;
    pthread_create(&threads[i].thread, NULL, body, &threads[i]);
  }
  for (int i = 0; i < num_threads; i++) pthread_join(threads[i].thread, NULL);
  printf("%lld %lld %ld\n", (long long)(now_ns(CLOCK_MONOTONIC) - begin),
         (long long)atomic_load(&cpu_ns), atomic_load(&num_events));
  return 0;
}
