/* Transfers of the proxy threads, summed per link: communicator, channel, peer, direction. See recorder.h.
 *
 * An operation takes a slot of a fixed pool until it stops; its handle carries the slot and the slot's generation, so
 * a handle that comes too late finds another generation and is ignored.
 */
#define _GNU_SOURCE
#include <string.h>

#include "state.h"

enum { MAX_LINKS = 8192, LINK_PROBES = 64, MAX_OPS = 4096, OP_PROBES = 256, STEPS_IN_FLIGHT = 16 };
enum { INDEX_BITS = 12, STEP_BITS = 4, GENERATION_BITS = NUMBER_BITS - INDEX_BITS - STEP_BITS };
static const int64_t WINDOW_NS = 10000000000;

struct link {
  _Atomic uint64_t key; /* 0: free */
  _Atomic int64_t record;
  _Atomic int64_t start_ns;
  _Atomic int32_t in_flight;
};

struct step {
  _Atomic int64_t since_ns; /* start of the state that the step is in */
  _Atomic int64_t bytes;
  _Atomic int32_t state; /* -1: none yet */
};

struct operation {
  _Atomic uint64_t generation; /* odd while the slot is taken */
  _Atomic(struct link *) link;
  _Atomic unsigned slot;
  _Atomic int64_t record, start_ns, steps_done, bytes;
  struct step steps[STEPS_IN_FLIGHT];
};

static struct link links[MAX_LINKS];
static struct operation operations[MAX_OPS];
static _Atomic uint32_t next_operation;

static uint64_t key_of(unsigned slot, const struct proxy_op_fields *fields) {
  return 1ull << 63 | (uint64_t)slot << 48 | (uint64_t)fields->channel << 40 | (uint64_t)(fields->is_send != 0) << 32 |
         (uint32_t)fields->peer;
}

static struct link *find_link(uint64_t key) {
  size_t start = (size_t)((key * 0x9E3779B97F4A7C15ull) >> 40) % MAX_LINKS;
  struct link *unused = NULL;
  for (size_t i = 0; i < LINK_PROBES; i++) {
    struct link *link = &links[(start + i) % MAX_LINKS];
    uint64_t known = atomic_load_explicit(&link->key, memory_order_acquire);
    if (known == key) return link;
    if (!known && !unused) unused = link; /* go on: the link may lie behind one that was freed */
  }
  uint64_t expected = 0;
  if (!unused || !atomic_compare_exchange_strong(&unused->key, &expected, key)) return NULL;
  atomic_store(&unused->record, -1);
  atomic_store(&unused->in_flight, 0);
  return unused;
}

static void complete(int64_t number) {
  struct nccl_links *record = tape_record(&recorder.links_tape, number);
  if (!record) return;
  tape_set_state(&recorder.links_tape, record, TAPE_COMPLETE);
  tape_release(&recorder.links_tape, number);
}

static struct nccl_links *begin_window(struct link *link, unsigned slot, const struct proxy_op_fields *fields,
                                       int64_t now) {
  struct nccl_links fresh = NCCL_LINKS_UNSET;
  int version = slot < MAX_COMMUNICATORS ? atomic_load(&recorder.communicators[slot].version) : 4;
  fresh.start_ns = fresh.progress_ns = now;
  fresh.num_ops = fresh.busy_ns = 0;
  if (recorder.mask & EVENT_PROXY_STEP) fresh.gpu_wait_ns = fresh.peer_wait_ns = fresh.network_wait_ns = 0;
  if (recorder.mask & EVENT_PROXY_STEP || version <= 3) fresh.num_steps = fresh.bytes = 0;
  if (slot < MAX_COMMUNICATORS) fresh.communicator = atomic_load(&recorder.communicators[slot].number);
  fresh.channel = fields->channel;
  fresh.peer = fields->peer;
  fresh.is_send = fields->is_send != 0;
  int64_t number;
  struct nccl_links *record = tape_append(&recorder.links_tape, &number);
  atomic_store(&link->record, record ? number : -1);
  atomic_store(&link->start_ns, now);
  if (record) {
    memcpy(record, &fresh, sizeof fresh - 1);
    tape_set_state(&recorder.links_tape, record, TAPE_OPEN);
  }
  return record;
}

/* The open record of a link; a new one if there is none or its window is over. The caller releases it. */
static struct nccl_links *open_record(struct link *link, unsigned slot, const struct proxy_op_fields *fields,
                                      int64_t now) {
  int64_t number = atomic_load(&link->record);
  bool is_over = now - atomic_load(&link->start_ns) > WINDOW_NS && atomic_load(&link->in_flight) <= 0;
  if (number >= 0 && is_over) complete(number);
  struct nccl_links *record = number >= 0 && !is_over ? tape_record(&recorder.links_tape, number) : NULL;
  return record ? record : begin_window(link, slot, fields, now);
}

static struct operation *take_operation(uint32_t *index, uint64_t *generation) {
  uint32_t start = atomic_fetch_add_explicit(&next_operation, 1, memory_order_relaxed);
  for (uint32_t i = 0; i < OP_PROBES; i++) {
    *index = (start + i) % MAX_OPS;
    struct operation *operation = &operations[*index];
    uint64_t known = atomic_load_explicit(&operation->generation, memory_order_relaxed);
    *generation = known + 1;
    if (!(known & 1) && atomic_compare_exchange_strong(&operation->generation, &known, known + 1)) return operation;
  }
  return NULL;
}

void *link_op_start(unsigned slot, const void *call, const struct proxy_op_fields *fields) {
  uint32_t index;
  uint64_t generation;
  struct link *link = find_link(key_of(slot, fields));
  struct operation *operation = link ? take_operation(&index, &generation) : NULL;
  if (!operation) return NULL;
  int64_t now = tape_now_ns();
  struct nccl_links *record = open_record(link, slot, fields, now);
  int64_t row = atomic_load(&link->record);
  atomic_store(&operation->link, link);
  atomic_store(&operation->slot, slot);
  atomic_store(&operation->record, row);
  atomic_store(&operation->start_ns, now);
  atomic_store(&operation->steps_done, 0);
  atomic_store(&operation->bytes, 0);
  atomic_fetch_add(&link->in_flight, 1);
  if (record) {
    STORE(record->op_start_ns, now);
    STORE(record->progress_ns, now);
    STORE(record->op_call, handle_kind_of(call) == HANDLE_CALL ? handle_number(call) : UNSET_I64);
    STORE(record->op_steps_done, LOAD(record->num_steps) == UNSET_I64 ? UNSET_I64 : 0);
    STORE(record->op_num_steps, (int64_t)fields->num_steps);
    tape_release(&recorder.links_tape, row);
  }
  int64_t number = (int64_t)((generation & ((1ull << GENERATION_BITS) - 1)) << (INDEX_BITS + STEP_BITS)) | index;
  return handle_of(HANDLE_OP, slot, 0, 0, number);
}

/* The operation of a handle, which may be a step's; NULL if another operation has its slot by now. */
static struct operation *operation_of(const void *handle) {
  int64_t number = handle_number(handle);
  struct operation *operation = &operations[number & (MAX_OPS - 1)];
  uint64_t generation = atomic_load_explicit(&operation->generation, memory_order_acquire);
  uint64_t claimed = (uint64_t)number >> (INDEX_BITS + STEP_BITS);
  return (generation & ((1ull << GENERATION_BITS) - 1)) == claimed ? operation : NULL;
}

static void give_back(struct operation *operation, uint64_t generation) {
  atomic_compare_exchange_strong(&operation->generation, &generation, generation + 1);
}

void link_op_stop(const void *handle) {
  struct operation *operation = operation_of(handle);
  if (!operation) return;
  int64_t number = atomic_load(&operation->record), now = tape_now_ns();
  struct nccl_links *record = tape_record(&recorder.links_tape, number);
  bool is_last = atomic_fetch_sub(&atomic_load(&operation->link)->in_flight, 1) <= 1;
  if (record) {
    ADD(record->num_ops, 1);
    ADD(record->busy_ns, now - atomic_load(&operation->start_ns));
    STORE(record->progress_ns, now);
    if (!(recorder.mask & EVENT_PROXY_STEP) && LOAD(record->num_steps) != UNSET_I64) {
      ADD(record->num_steps, atomic_load(&operation->steps_done));
      ADD(record->bytes, atomic_load(&operation->bytes));
    }
    if (is_last) {
      STORE(record->op_start_ns, UNSET_I64);
      STORE(record->op_call, UNSET_I64);
      STORE(record->op_steps_done, UNSET_I64);
      STORE(record->op_num_steps, UNSET_I64);
    }
    tape_release(&recorder.links_tape, number);
  }
  give_back(operation, atomic_load(&operation->generation));
}

/* Up to version 3 the states of an operation carry its steps and bytes so far. */
void link_op_progress(const void *handle, int64_t steps, int64_t bytes) {
  struct operation *operation = operation_of(handle);
  if (!operation || recorder.mask & EVENT_PROXY_STEP) return;
  atomic_store(&operation->steps_done, steps);
  atomic_store(&operation->bytes, bytes);
  int64_t number = atomic_load(&operation->record);
  struct nccl_links *record = tape_record(&recorder.links_tape, number);
  if (!record) return;
  STORE(record->op_steps_done, steps);
  STORE(record->progress_ns, tape_now_ns());
  tape_release(&recorder.links_tape, number);
}

void *link_step_start(const void *op, int step) {
  struct operation *operation = operation_of(op);
  if (!operation) return NULL;
  unsigned place = (unsigned)step % STEPS_IN_FLIGHT;
  struct step *known = &operation->steps[place];
  atomic_store_explicit(&known->state, -1, memory_order_relaxed);
  atomic_store_explicit(&known->bytes, 0, memory_order_relaxed);
  atomic_store_explicit(&known->since_ns, tape_now_ns(), memory_order_relaxed);
  int64_t number = handle_number(op) | (int64_t)place << INDEX_BITS;
  return handle_of(HANDLE_STEP, handle_slot(op), 0, 0, number);
}

static struct step *step_of(struct operation *operation, const void *handle) {
  return &operation->steps[handle_number(handle) >> INDEX_BITS & (STEPS_IN_FLIGHT - 1)];
}

static int64_t *wait_column(struct nccl_links *record, int32_t state) {
  switch (state) {
    case STATE_STEP_SEND_GPU_WAIT:
    case STATE_STEP_RECV_FLUSH_WAIT:
    case STATE_STEP_RECV_GPU_WAIT: return &record->gpu_wait_ns;
    case STATE_STEP_SEND_PEER_WAIT: return &record->peer_wait_ns;
    case STATE_STEP_SEND_WAIT:
    case STATE_STEP_RECV_WAIT: return &record->network_wait_ns;
    default: return NULL;
  }
}

/* Add the time since the step's last change to the wait that it was in. */
static void change_state(struct nccl_links *record, struct step *step, int32_t state, int64_t now) {
  int64_t since = atomic_exchange_explicit(&step->since_ns, now, memory_order_relaxed);
  int64_t *column = wait_column(record, atomic_exchange_explicit(&step->state, state, memory_order_relaxed));
  if (column && LOAD(*column) != UNSET_I64) ADD(*column, now - since);
}

void link_step_state(const void *handle, int state, int64_t bytes) {
  struct operation *operation = operation_of(handle);
  int64_t number = operation ? atomic_load(&operation->record) : -1;
  struct nccl_links *record = tape_record(&recorder.links_tape, number);
  if (!record) return;
  struct step *step = step_of(operation, handle);
  if (bytes != UNSET_I64) atomic_store_explicit(&step->bytes, bytes, memory_order_relaxed);
  change_state(record, step, state, tape_now_ns());
  tape_release(&recorder.links_tape, number);
}

void link_step_stop(const void *handle) {
  struct operation *operation = operation_of(handle);
  int64_t number = operation ? atomic_load(&operation->record) : -1;
  struct nccl_links *record = tape_record(&recorder.links_tape, number);
  if (!record) return;
  int64_t now = tape_now_ns();
  struct step *step = step_of(operation, handle);
  change_state(record, step, -1, now);
  if (LOAD(record->num_steps) != UNSET_I64) {
    ADD(record->num_steps, 1);
    ADD(record->bytes, atomic_load_explicit(&step->bytes, memory_order_relaxed));
    ADD(record->op_steps_done, 1);
  }
  STORE(record->progress_ns, now);
  tape_release(&recorder.links_tape, number);
}

/* A communicator has ended: its links are complete, and operations that never stopped give their slots back. */
void links_finalize(unsigned slot) {
  for (int i = 0; i < MAX_OPS; i++) {
    uint64_t generation = atomic_load(&operations[i].generation);
    if (generation & 1 && atomic_load(&operations[i].slot) == slot) give_back(&operations[i], generation);
  }
  for (int i = 0; i < MAX_LINKS; i++) {
    uint64_t key = atomic_load(&links[i].key);
    if (!key || (key >> 48 & 0x7fff) != slot) continue;
    int64_t record = atomic_load(&links[i].record);
    if (record >= 0 && atomic_load(&links[i].in_flight) <= 0) complete(record); /* else it shows what was in flight */
    atomic_store(&links[i].key, 0);
  }
}
