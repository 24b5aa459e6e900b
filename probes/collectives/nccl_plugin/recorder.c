/* Communicators, calls and kernels as records of tapes; see recorder.h. Nothing here returns an error to NCCL. */
#define _GNU_SOURCE
#include "recorder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "names.h"
#include "state.h"

#define TAPE(upper, type)                                                                                       \
  {                                                                                                             \
    .table = upper##_TABLE, .fields = upper##_FIELDS, .record_bytes = sizeof(struct type), .shift = upper##_SHIFT, \
    .lock = PTHREAD_MUTEX_INITIALIZER, .segments = {{.index = -1}, {.index = -1}, {.index = -1}, {.index = -1}}, \
    .current = -1                                                                                                \
  }

struct recorder recorder = {
    .communicators_tape = TAPE(NCCL_COMMUNICATORS, nccl_communicators),
    .calls_tape = TAPE(NCCL_CALLS, nccl_calls),
    .channels_tape = TAPE(NCCL_CHANNELS, nccl_channels),
    .links_tape = TAPE(NCCL_LINKS, nccl_links),
};

static struct tape *const tapes[] = {&recorder.communicators_tape, &recorder.calls_tape, &recorder.channels_tape,
                                     &recorder.links_tape};
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static const char *problem; /* why nothing is recorded; NULL if something is */
static _Atomic int32_t num_communicators;

static void forked(void) { atomic_store(&recorder.is_active, false); }

/* RANKSCOPE_NCCL_EVENTS: a list of calls, kernels, links, channels, steps. A call is always recorded. */
static void choose_events(void) {
  const char *text = getenv("RANKSCOPE_NCCL_EVENTS");
  if (!text || !*text) text = "calls,kernels,links";
  recorder.mask = EVENT_COLL | EVENT_P2P | EVENT_CE_COLL;
  recorder.with_channels = strstr(text, "channels") != NULL;
  if (strstr(text, "kernels") || recorder.with_channels) recorder.mask |= EVENT_KERNEL_CHANNEL;
  bool with_steps = strstr(text, "steps") != NULL;
  if (strstr(text, "links") || with_steps) recorder.mask |= EVENT_PROXY_OP;
  if (with_steps) recorder.mask |= EVENT_PROXY_STEP;
}

static void open_once(void) {
  const char *directory = getenv("RANKSCOPE_NCCL_DIR");
  const char *rank = getenv("RANKSCOPE_NCCL_RANK"), *attempt = getenv("RANKSCOPE_NCCL_ATTEMPT");
  problem = "RANKSCOPE_NCCL_DIR is not set";
  if (!directory || !*directory) return;
  problem = "RANKSCOPE_NCCL_DIR is too long";
  if (strlen(directory) >= sizeof tape_place.directory) return;
  strcpy(tape_place.directory, directory);
  tape_place.rank = rank ? atoi(rank) : 0;
  tape_place.attempt = attempt ? atoi(attempt) : 0;
  problem = "another process records NCCL there already, or the folder cannot be written";
  if (!names_open(directory)) return;
  problem = NULL;
  choose_events();
  recorder.pid = getpid();
  pthread_atfork(NULL, NULL, forked);
  tape_start(tapes, sizeof tapes / sizeof *tapes);
  atomic_store(&recorder.is_active, true);
}

/* Slots are used in turn, so that a late event of an ended communicator is not attributed to the slot's next one. */
static struct communicator *take_slot(void) {
  static _Atomic unsigned turn;
  for (unsigned i = 0; i < MAX_COMMUNICATORS; i++) {
    struct communicator *communicator = &recorder.communicators[atomic_fetch_add(&turn, 1) % MAX_COMMUNICATORS];
    bool expected = false;
    if (atomic_compare_exchange_strong(&communicator->is_used, &expected, true)) return communicator;
  }
  return NULL;
}

/* Make room for the counters of p2p calls. A slot's older arrays are not freed, since a late event may still count in
 * one; sizes double, so all arrays of a slot take less than twice the memory of its newest. */
static void make_room(struct communicator *communicator, int num_ranks) {
  if (num_ranks > atomic_load(&communicator->p2p_ranks)) {
    int size = 8;
    while (size < num_ranks && size < 1 << 20) size *= 2;
    _Atomic int64_t *room = calloc((size_t)size * 2, sizeof *room);
    if (!room || size < num_ranks) return free(room);
    atomic_store(&communicator->p2p_calls, room);
    atomic_store(&communicator->p2p_ranks, size);
  }
  _Atomic int64_t *calls = atomic_load(&communicator->p2p_calls);
  for (int i = 0; i < num_ranks * 2; i++) atomic_store_explicit(&calls[i], 0, memory_order_relaxed);
}

static void prepare(struct communicator *communicator, const struct communicator_facts *facts) {
  atomic_store(&communicator->version, facts->version);
  atomic_store(&communicator->number, atomic_fetch_add(&num_communicators, 1));
  atomic_store(&communicator->num_collectives, 0);
  atomic_store(&communicator->is_described, facts->num_ranks > 0);
  make_room(communicator, facts->num_ranks);
  for (int i = 0; i < MAX_CHANNELS; i++) {
    atomic_store(&communicator->channels[i].call, -1);
    atomic_store(&communicator->channels[i].row, -1);
  }
}

static void describe(struct communicator *communicator, const struct communicator_facts *facts) {
  struct nccl_communicators fresh = NCCL_COMMUNICATORS_UNSET;
  fresh.communicator = atomic_load_explicit(&communicator->number, memory_order_relaxed);
  fresh.interface_version = facts->version;
  fresh.event_mask = recorder.mask;
  fresh.created_ns = tape_now_ns();
  if (facts->num_ranks > 0) {
    fresh.comm_hash = (int64_t)facts->hash;
    fresh.num_ranks = facts->num_ranks;
    fresh.num_nodes = facts->num_nodes;
    fresh.comm_rank = facts->rank;
  }
  fresh.comm_name = name_of_text(facts->name);
  int64_t number;
  struct nccl_communicators *record = tape_append(&recorder.communicators_tape, &number);
  atomic_store(&communicator->record, record ? number : -1);
  if (!record) return;
  memcpy(record, &fresh, sizeof fresh - 1);
  tape_set_state(&recorder.communicators_tape, record, TAPE_OPEN);
  tape_release(&recorder.communicators_tape, number);
}

void *recorder_begin(const struct communicator_facts *facts, int *mask) {
  int saved = errno;
  pthread_once(&opened, open_once);
  struct communicator *communicator = atomic_load(&recorder.is_active) ? take_slot() : NULL;
  if (communicator) {
    prepare(communicator, facts);
    describe(communicator, facts);
  }
  /* NCCL has one mask per process: a communicator that finds no slot must not switch off the events of the others. */
  if (mask && (communicator || !atomic_load(&recorder.is_active))) *mask = communicator ? recorder.mask : 0;
  const char *why = problem ? problem : communicator ? NULL : "a forked child, or too many communicators";
  if (facts->logger && why)
    facts->logger(NCCL_LOG_WARN, NCCL_SUBSYSTEM_INIT, __FILE__, __LINE__, "rankscope records no NCCL call: %s", why);
  else if (facts->logger)
    facts->logger(NCCL_LOG_INFO, NCCL_SUBSYSTEM_INIT, __FILE__, __LINE__, "rankscope records NCCL calls in %s",
                  tape_place.directory);
  errno = saved;
  return communicator;
}

static struct communicator *communicator_of(const void *context, unsigned *slot) {
  uintptr_t offset = (uintptr_t)context - (uintptr_t)recorder.communicators;
  if (!context || offset >= sizeof recorder.communicators || offset % sizeof(struct communicator)) return NULL;
  *slot = (unsigned)(offset / sizeof(struct communicator));
  struct communicator *communicator = &recorder.communicators[*slot];
  return atomic_load_explicit(&recorder.is_active, memory_order_relaxed) && atomic_load(&communicator->is_used)
             ? communicator
             : NULL;
}

void recorder_finalize(void *context) {
  unsigned slot;
  struct communicator *communicator = communicator_of(context, &slot);
  if (!communicator) return;
  links_finalize(slot);
  int64_t number = atomic_load(&communicator->record);
  struct nccl_communicators *record = tape_record(&recorder.communicators_tape, number);
  if (record) {
    STORE(record->finalized_ns, tape_now_ns());
    tape_set_state(&recorder.communicators_tape, record, TAPE_COMPLETE);
    tape_release(&recorder.communicators_tape, number);
  }
  atomic_store(&communicator->is_used, false);
}

/* Up to version 3 a communicator is described by its first call. */
static void describe_by_call(struct communicator *communicator, const struct call_facts *facts) {
  if (atomic_exchange(&communicator->is_described, true)) return;
  int64_t number = atomic_load(&communicator->record);
  struct nccl_communicators *record = tape_record(&recorder.communicators_tape, number);
  if (!record) return;
  STORE(record->comm_hash, (int64_t)facts->comm_hash);
  STORE(record->comm_name, name_of_text(facts->comm_name));
  STORE(record->comm_rank, facts->rank);
  tape_release(&recorder.communicators_tape, number);
}

static int64_t next_seq(struct communicator *communicator, const struct call_facts *facts) {
  int peer = facts->peer;
  if (peer == UNSET_I32) return atomic_fetch_add_explicit(&communicator->num_collectives, 1, memory_order_relaxed);
  if (peer < 0 || peer >= atomic_load(&communicator->p2p_ranks)) return UNSET_I64;
  int is_send = facts->function && !strcmp(facts->function, "Send");
  _Atomic int64_t *calls = atomic_load(&communicator->p2p_calls);
  return atomic_fetch_add_explicit(&calls[peer * 2 + is_send], 1, memory_order_relaxed);
}

void *recorder_call(void *context, const struct call_facts *facts) {
  unsigned slot;
  struct communicator *communicator = communicator_of(context, &slot);
  if (!communicator) return NULL;
  if (!atomic_load_explicit(&communicator->is_described, memory_order_relaxed)) describe_by_call(communicator, facts);
  struct nccl_calls fresh = NCCL_CALLS_UNSET;
  bool has_kernel = facts->has_kernel && recorder.mask & EVENT_KERNEL_CHANNEL;
  fresh.seq = next_seq(communicator, facts);
  fresh.nccl_seq = facts->seq;
  fresh.count = facts->count;
  fresh.enqueue_ns = tape_now_ns();
  if (has_kernel) fresh.channels_started = fresh.channels_stopped = 0;
  fresh.communicator = atomic_load_explicit(&communicator->number, memory_order_relaxed);
  fresh.root = facts->root;
  fresh.peer = facts->peer;
  fresh.num_channels = facts->num_channels;
  fresh.function = name_of_constant(facts->function);
  fresh.dtype = name_of_constant(facts->dtype);
  fresh.algorithm = name_of_constant(facts->algorithm);
  fresh.protocol = name_of_constant(facts->protocol);
  int64_t number;
  struct nccl_calls *record = tape_append(&recorder.calls_tape, &number);
  if (!record) return NULL;
  fresh.call = number;
  memcpy(record, &fresh, sizeof fresh - 1);
  tape_set_state(&recorder.calls_tape, record, TAPE_OPEN);
  tape_release(&recorder.calls_tape, number);
  unsigned flags = (has_kernel ? FLAG_HAS_KERNEL : 0) | (facts->counts_channels ? FLAG_COUNTS_CHANNELS : 0);
  return handle_of(HANDLE_CALL, slot, flags, 0, number);
}

/* Whether the kernel of a call is over as far as its events show. Where NCCL does not say reliably how many channels
 * a call has (p2p, and all calls of version 3), it is over when all that started have stopped. */
static bool is_kernel_over(struct nccl_calls *record, unsigned flags) {
  uint64_t stopped = (uint64_t)__atomic_load_n(&record->channels_stopped, __ATOMIC_SEQ_CST);
  if (flags & FLAG_COUNTS_CHANNELS) return __builtin_popcountll(stopped) >= LOAD(record->num_channels);
  return stopped && stopped == (uint64_t)LOAD(record->channels_started);
}

static void call_stop(const void *handle) {
  struct nccl_calls *record = tape_record(&recorder.calls_tape, handle_number(handle));
  if (!record) return;
  unsigned flags = handle_flags_of(handle);
  __atomic_store_n(&record->launched_ns, tape_now_ns(), __ATOMIC_SEQ_CST);
  if (!(flags & FLAG_HAS_KERNEL))
    tape_set_state(&recorder.calls_tape, record, TAPE_COMPLETE);
  else if (is_kernel_over(record, flags)) {
    if (LOAD(record->kernel_end_ns) == UNSET_I64) STORE(record->kernel_end_ns, tape_now_ns());
    tape_set_state(&recorder.calls_tape, record, TAPE_COMPLETE);
  }
  tape_release(&recorder.calls_tape, handle_number(handle));
}

static void store_extreme(int64_t *field, int64_t value, int sign) {
  int64_t known = LOAD(*field);
  while (known == UNSET_I64 || (sign > 0 ? value > known : value < known))
    if (__atomic_compare_exchange_n(field, &known, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
}

static int64_t append_row(const struct communicator *communicator, int64_t call, int channel, int64_t gpu_ns) {
  struct nccl_channels fresh = NCCL_CHANNELS_UNSET;
  fresh.call = call;
  fresh.start_ns = tape_now_ns();
  fresh.gpu_start_ns = gpu_ns;
  fresh.communicator = atomic_load_explicit(&communicator->number, memory_order_relaxed);
  fresh.channel = channel;
  int64_t row;
  struct nccl_channels *record = tape_append(&recorder.channels_tape, &row);
  if (!record) return -1;
  memcpy(record, &fresh, sizeof fresh - 1);
  tape_set_state(&recorder.channels_tape, record, TAPE_OPEN);
  tape_release(&recorder.channels_tape, row);
  return row;
}

static void complete_row(int64_t row, int64_t gpu_ns) {
  struct nccl_channels *record = tape_record(&recorder.channels_tape, row);
  if (!record) return;
  STORE(record->end_ns, tape_now_ns());
  STORE(record->gpu_end_ns, gpu_ns);
  tape_set_state(&recorder.channels_tape, record, TAPE_COMPLETE);
  tape_release(&recorder.channels_tape, row);
}

void *recorder_kernel(void *context, void *call, int channel, int64_t gpu_ns) {
  unsigned slot;
  struct communicator *communicator = communicator_of(context, &slot);
  if (!communicator || handle_kind_of(call) != HANDLE_CALL || channel < 0 || channel >= MAX_CHANNELS) return NULL;
  int64_t number = handle_number(call);
  unsigned flags = handle_flags_of(call);
  struct nccl_calls *record = tape_record(&recorder.calls_tape, number);
  if (!record || !(flags & FLAG_HAS_KERNEL)) {
    if (record) tape_release(&recorder.calls_tape, number);
    return NULL;
  }
  if (!__atomic_fetch_or(&record->channels_started, (int64_t)(1ull << channel), __ATOMIC_SEQ_CST))
    STORE(record->kernel_start_ns, tape_now_ns());
  if (gpu_ns != UNSET_I64) store_extreme(&record->gpu_start_ns, gpu_ns, -1);
  if (!(flags & FLAG_COUNTS_CHANNELS) && tape_state(&recorder.calls_tape, record) == TAPE_COMPLETE)
    tape_set_state(&recorder.calls_tape, record, TAPE_OPEN); /* its other channels were faster than this one */
  tape_release(&recorder.calls_tape, number);
  struct channel_run *run = &communicator->channels[channel];
  atomic_store_explicit(&run->gpu_start_ns, gpu_ns, memory_order_relaxed);
  atomic_store_explicit(&run->gpu_end_ns, UNSET_I64, memory_order_relaxed);
  int64_t row = recorder.with_channels ? append_row(communicator, number, channel, gpu_ns) : -1;
  atomic_store_explicit(&run->row, row, memory_order_relaxed);
  atomic_store_explicit(&run->call, number, memory_order_release);
  return handle_of(HANDLE_KERNEL, slot, flags, (unsigned)channel, number);
}

static void store_channel(struct nccl_calls *record, struct channel_run *run, unsigned channel) {
  int64_t start = atomic_load_explicit(&run->gpu_start_ns, memory_order_relaxed);
  int64_t end = atomic_load_explicit(&run->gpu_end_ns, memory_order_relaxed);
  if (start == UNSET_I64 || end == UNSET_I64) return;
  store_extreme(&record->gpu_end_ns, end, 1);
  int64_t longest = LOAD(record->slowest_channel_ns);
  if (longest != UNSET_I64 && end - start <= longest) return;
  STORE(record->slowest_channel_ns, end - start);
  STORE(record->slowest_channel, (int32_t)channel);
}

static void kernel_stop(const void *handle) {
  unsigned slot = handle_slot(handle), channel = handle_channel(handle), flags = handle_flags_of(handle);
  int64_t number = handle_number(handle);
  if (slot >= MAX_COMMUNICATORS) return;
  struct channel_run *run = &recorder.communicators[slot].channels[channel];
  struct nccl_calls *record = tape_record(&recorder.calls_tape, number);
  bool is_current = atomic_load_explicit(&run->call, memory_order_acquire) == number;
  if (is_current && recorder.with_channels)
    complete_row(atomic_load_explicit(&run->row, memory_order_relaxed),
                 atomic_load_explicit(&run->gpu_end_ns, memory_order_relaxed));
  if (!record) return;
  if (is_current) store_channel(record, run, channel);
  __atomic_fetch_or(&record->channels_stopped, (int64_t)(1ull << channel), __ATOMIC_SEQ_CST);
  if (is_kernel_over(record, flags)) {
    STORE(record->kernel_end_ns, tape_now_ns());
    if (__atomic_load_n(&record->launched_ns, __ATOMIC_SEQ_CST) != UNSET_I64)
      tape_set_state(&recorder.calls_tape, record, TAPE_COMPLETE);
  }
  tape_release(&recorder.calls_tape, number);
}

static void kernel_state(const void *handle, int64_t gpu_ns) {
  unsigned slot = handle_slot(handle);
  if (slot >= MAX_COMMUNICATORS) return;
  struct channel_run *run = &recorder.communicators[slot].channels[handle_channel(handle)];
  if (atomic_load_explicit(&run->call, memory_order_acquire) == handle_number(handle))
    atomic_store_explicit(&run->gpu_end_ns, gpu_ns, memory_order_relaxed);
}

/* Not NULL: NCCL numbers graph-captured calls the same on all ranks only where their group has a handle. */
void *recorder_group(void) { return handle_of(HANDLE_GROUP, 0, 0, 0, 0); }

void *recorder_proxy_op(void *context, void *call, const struct proxy_op_fields *fields) {
  unsigned slot = NO_COMMUNICATOR;
  if (!atomic_load_explicit(&recorder.is_active, memory_order_relaxed)) return NULL;
  /* With PXN, context and parent are addresses of the process that made the call, which mean nothing here. */
  if (fields->pid != recorder.pid) return link_op_start(NO_COMMUNICATOR, NULL, fields);
  return communicator_of(context, &slot) ? link_op_start(slot, call, fields) : NULL;
}

void *recorder_proxy_step(void *op, int step) {
  if (!atomic_load_explicit(&recorder.is_active, memory_order_relaxed)) return NULL;
  return handle_kind_of(op) == HANDLE_OP ? link_step_start(op, step) : NULL;
}

void recorder_stop(void *handle) {
  if (!handle || !atomic_load_explicit(&recorder.is_active, memory_order_relaxed)) return;
  switch (handle_kind_of(handle)) {
    case HANDLE_CALL: call_stop(handle); break;
    case HANDLE_KERNEL: kernel_stop(handle); break;
    case HANDLE_OP: link_op_stop(handle); break;
    case HANDLE_STEP: link_step_stop(handle); break;
    default: break;
  }
}

void recorder_state(void *handle, int state, int64_t gpu_ns, int64_t bytes, int64_t steps) {
  if (!handle || !atomic_load_explicit(&recorder.is_active, memory_order_relaxed)) return;
  enum handle_kind kind = handle_kind_of(handle);
  if (kind == HANDLE_KERNEL && state == STATE_KERNEL_CHANNEL_STOP) kernel_state(handle, gpu_ns);
  if (kind == HANDLE_OP && steps != UNSET_I64) link_op_progress(handle, steps, bytes);
  if (kind == HANDLE_STEP) link_step_state(handle, state, bytes);
}
