/* What recorder.c and links.c share: the tapes, the communicators, and how a handle is read. */
#ifndef RANKSCOPE_STATE_H
#define RANKSCOPE_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "nccl_interface.h"
#include "tape.h"
#include "tape_layout.h"

enum { MAX_COMMUNICATORS = 1023, NO_COMMUNICATOR = 1023, MAX_CHANNELS = 64 };

/* The kernel of one communicator on one channel: the device runs one call after another there. */
struct channel_run {
  _Atomic int64_t call;
  _Atomic int64_t gpu_start_ns;
  _Atomic int64_t gpu_end_ns;
  _Atomic int64_t row; /* in nccl_channels, or -1 */
};

struct communicator {
  _Atomic bool is_used;
  _Atomic bool is_described;
  _Atomic int version;
  _Atomic int32_t number;
  _Atomic int64_t record;
  _Atomic int64_t num_collectives;
  _Atomic(_Atomic int64_t *) p2p_calls; /* per peer, sends and receives; kept for the slot's next communicator */
  _Atomic int p2p_ranks;
  struct channel_run channels[MAX_CHANNELS];
};

struct recorder {
  _Atomic bool is_active; /* false in a forked child, and where nothing can be recorded */
  int mask;
  bool with_channels;
  pid_t pid;
  struct tape communicators_tape, calls_tape, channels_tape, links_tape;
  struct communicator communicators[MAX_COMMUNICATORS];
};
extern struct recorder recorder;

/* Handles are numbers, not addresses: NCCL may use one long after what it stood for is gone. From the top: kind (4
 * bits), slot of the communicator (10), flags (2), channel (6), number (42). */
enum handle_kind { HANDLE_GROUP = 1, HANDLE_CALL = 2, HANDLE_KERNEL = 3, HANDLE_OP = 4, HANDLE_STEP = 5 };
enum handle_flags { FLAG_COUNTS_CHANNELS = 1, FLAG_HAS_KERNEL = 2 };
enum { NUMBER_BITS = 42, CHANNEL_BITS = 6, FLAG_BITS = 2, SLOT_BITS = 10 };

static inline void *handle_of(enum handle_kind kind, unsigned slot, unsigned flags, unsigned channel, int64_t number) {
  uint64_t value = kind;
  value = value << SLOT_BITS | slot;
  value = value << FLAG_BITS | flags;
  value = value << CHANNEL_BITS | channel;
  value = value << NUMBER_BITS | ((uint64_t)number & (((uint64_t)1 << NUMBER_BITS) - 1));
  return (void *)(uintptr_t)value;
}

static inline unsigned bits_of(const void *handle, int shift, int bits) {
  return (unsigned)((uint64_t)(uintptr_t)handle >> shift & ((1u << bits) - 1));
}

static inline int64_t handle_number(const void *handle) {
  return (int64_t)((uint64_t)(uintptr_t)handle & (((uint64_t)1 << NUMBER_BITS) - 1));
}
static inline unsigned handle_channel(const void *handle) { return bits_of(handle, NUMBER_BITS, CHANNEL_BITS); }
static inline unsigned handle_flags_of(const void *handle) {
  return bits_of(handle, NUMBER_BITS + CHANNEL_BITS, FLAG_BITS);
}
static inline unsigned handle_slot(const void *handle) {
  return bits_of(handle, NUMBER_BITS + CHANNEL_BITS + FLAG_BITS, SLOT_BITS);
}
static inline enum handle_kind handle_kind_of(const void *handle) {
  return (enum handle_kind)((uint64_t)(uintptr_t)handle >> 60);
}

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)
#define ADD(field, value) __atomic_fetch_add(&(field), (value), __ATOMIC_RELAXED)

/* links.c */
void *link_op_start(unsigned slot, const void *call, const struct proxy_op_fields *fields);
void link_op_stop(const void *handle);
void link_op_progress(const void *handle, int64_t steps, int64_t bytes);
void *link_step_start(const void *op, int step);
void link_step_state(const void *handle, int state, int64_t bytes);
void link_step_stop(const void *handle);
void links_finalize(unsigned slot);

#endif
