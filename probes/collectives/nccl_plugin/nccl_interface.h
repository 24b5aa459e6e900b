/* NCCL's profiler plugin interface, versions 1 to 7: only the layouts, numbers and function types that the plugin uses.
 *
 * NCCL looks for the symbols ncclProfiler_v7, _v6, ... _v1 and takes the newest that it knows. Each version differs in
 * the arguments of `init` and in the descriptor of an event. The offsets are asserted below: they are those of the
 * x86-64 and AArch64 Linux ABI for the published declarations, and `tests/probes/collectives/nccl_plugin` checks them
 * a second time against ctypes.
 */
#ifndef RANKSCOPE_NCCL_INTERFACE_H
#define RANKSCOPE_NCCL_INTERFACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { NCCL_SUCCESS = 0 };
enum { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum { NCCL_SUBSYSTEM_INIT = 1 };

/* Types of events, bits of the activation mask. */
enum {
  EVENT_GROUP = 1 << 0,
  EVENT_COLL = 1 << 1,
  EVENT_P2P = 1 << 2,
  EVENT_PROXY_OP = 1 << 3,
  EVENT_PROXY_STEP = 1 << 4,
  EVENT_PROXY_CTRL = 1 << 5,
  EVENT_KERNEL_CHANNEL = 1 << 6,
  EVENT_NET_PLUGIN = 1 << 7,
  EVENT_CE_COLL = 1 << 12,
};

/* States that `recordEventState` reports; those not listed are ignored. */
enum {
  STATE_OP_SEND_POSTED = 0, /* up to interface 3: states 0 to 7 of an operation carry its steps so far */
  STATE_OP_RECV_DONE = 7,
  STATE_STEP_SEND_GPU_WAIT = 8,
  STATE_STEP_SEND_WAIT = 9,
  STATE_STEP_RECV_WAIT = 10,
  STATE_STEP_RECV_FLUSH_WAIT = 11,
  STATE_STEP_RECV_GPU_WAIT = 12,
  STATE_OP_IN_PROGRESS = 19,
  STATE_STEP_SEND_PEER_WAIT = 20,
  STATE_KERNEL_CHANNEL_STOP = 22,
};

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct proxy_op_fields {
  pid_t pid; /* process that made the call: another one where a neighbour's proxy sends for it (PXN) */
  uint8_t channel;
  int peer;
  int num_steps;
  int chunk_bytes;
  int is_send;
};

/* Versions 1 to 4 begin with an 8-bit type, later ones with a 64-bit type; both have the parent at 8, the rank at 16
 * and the union at 24. */
#define DESCRIPTOR_HEAD(type_of_type) \
  type_of_type type;                  \
  void *parent;                       \
  int rank

struct descriptor_v1 {
  DESCRIPTOR_HEAD(uint8_t);
  union {
    struct {
      const char *name;
      uint64_t comm_hash;
      uint64_t seq;
      uint8_t function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      uint8_t dtype;
      uint32_t op;
      size_t traffic_bytes;
      uint8_t num_channels;
      uint8_t num_warps;
      uint8_t algorithm;
      uint8_t protocol;
      int is_collnet;
      int is_nvls;
    } coll;
    struct {
      const char *name;
      uint64_t comm_hash;
      uint8_t function;
      void *buffer;
      uint8_t dtype;
      size_t count;
      int peer;
    } p2p;
    struct proxy_op_fields proxy_op;
    struct { int step; } proxy_step;
  };
};

struct descriptor_v2 {
  DESCRIPTOR_HEAD(uint8_t);
  union {
    struct {
      const char *name;
      uint64_t comm_hash;
      uint64_t seq;
      const char *function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *dtype;
      size_t traffic_bytes;
      uint8_t num_channels;
      uint8_t num_warps;
      const char *algorithm;
      const char *protocol;
    } coll;
    struct {
      const char *name;
      uint64_t comm_hash;
      const char *function;
      void *buffer;
      const char *dtype;
      size_t count;
      int peer;
    } p2p;
    struct proxy_op_fields proxy_op;
    struct { int step; } proxy_step;
  };
};

struct descriptor_v3 {
  DESCRIPTOR_HEAD(uint8_t);
  union {
    struct {
      const char *name;
      uint64_t comm_hash;
      uint64_t seq;
      const char *function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *dtype;
      uint8_t num_channels;
      uint8_t num_warps;
      const char *algorithm;
      const char *protocol;
    } coll;
    struct {
      const char *name;
      uint64_t comm_hash;
      const char *function;
      void *buffer;
      const char *dtype;
      size_t count;
      int peer;
    } p2p;
    struct proxy_op_fields proxy_op;
    struct { int step; } proxy_step;
    struct { uint8_t channel; } kernel;
  };
};

/* From version 4 on the fields that are read have kept their places; versions 5 to 7 append to them, so one layout
 * serves four versions. The type is read as 8 bits in version 4. */
struct descriptor_v4 {
  DESCRIPTOR_HEAD(uint64_t);
  union {
    struct {
      uint64_t seq;
      const char *function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *dtype;
      uint8_t num_channels;
      uint8_t num_warps;
      const char *algorithm;
      const char *protocol;
    } coll;
    struct {
      const char *function;
      void *buffer;
      const char *dtype;
      size_t count;
      int peer;
      uint8_t num_channels;
    } p2p;
    struct proxy_op_fields proxy_op;
    struct { int step; } proxy_step;
    struct {
      uint8_t channel;
      uint64_t gpu_ns;
    } kernel;
    struct { /* version 6 on: a collective by copy engines */
      uint64_t seq;
      const char *function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *dtype;
    } ce_coll;
  };
};

union state_arguments_v1 { /* versions 1 to 3 */
  struct {
    size_t bytes;
    int steps;
  } proxy_op;
};

union state_arguments_v4 { /* versions 4 to 7 */
  struct { size_t bytes; } proxy_step;
  struct { uint64_t gpu_ns; } kernel;
};

#define AT(type, member, offset) _Static_assert(offsetof(struct type, member) == (offset), #type "." #member)
AT(descriptor_v1, parent, 8);
AT(descriptor_v1, rank, 16);
AT(descriptor_v1, coll.name, 24);
AT(descriptor_v1, coll.function, 48);
AT(descriptor_v1, coll.count, 72);
AT(descriptor_v1, coll.root, 80);
AT(descriptor_v1, coll.dtype, 84);
AT(descriptor_v1, coll.num_channels, 104);
AT(descriptor_v1, coll.algorithm, 106);
AT(descriptor_v1, p2p.function, 40);
AT(descriptor_v1, p2p.count, 64);
AT(descriptor_v1, p2p.peer, 72);
AT(descriptor_v2, coll.function, 48);
AT(descriptor_v2, coll.dtype, 88);
AT(descriptor_v2, coll.num_channels, 104);
AT(descriptor_v2, coll.algorithm, 112);
AT(descriptor_v2, p2p.dtype, 56);
AT(descriptor_v2, p2p.peer, 72);
AT(descriptor_v3, coll.num_channels, 96);
AT(descriptor_v3, coll.protocol, 112);
AT(descriptor_v3, kernel.channel, 24);
AT(descriptor_v4, coll.seq, 24);
AT(descriptor_v4, coll.count, 56);
AT(descriptor_v4, coll.root, 64);
AT(descriptor_v4, coll.dtype, 72);
AT(descriptor_v4, coll.num_channels, 80);
AT(descriptor_v4, coll.algorithm, 88);
AT(descriptor_v4, coll.protocol, 96);
AT(descriptor_v4, p2p.count, 48);
AT(descriptor_v4, p2p.peer, 56);
AT(descriptor_v4, p2p.num_channels, 60);
AT(descriptor_v4, kernel.gpu_ns, 32);
AT(descriptor_v4, proxy_op.channel, 28);
AT(descriptor_v4, proxy_op.peer, 32);
AT(descriptor_v4, proxy_op.is_send, 44);
AT(descriptor_v4, ce_coll.dtype, 72);
#undef AT

typedef int (*stop_function)(void *handle);
typedef int (*start_function)(void *context, void **handle, void *descriptor);
typedef int (*state_function)(void *handle, int state, void *arguments);

struct profiler_v1 { /* versions 1 to 3 */
  const char *name;
  int (*init)(void **context, int *mask);
  start_function start;
  stop_function stop;
  state_function state;
  int (*finalize)(void *context);
};

struct profiler_v4 {
  const char *name;
  int (*init)(void **context, int *mask, const char *comm_name, uint64_t comm_hash, int num_nodes, int num_ranks,
              int rank, nccl_logger logger);
  start_function start;
  stop_function stop;
  state_function state;
  int (*finalize)(void *context);
};

struct profiler_v5 { /* versions 5 to 7 */
  const char *name;
  int (*init)(void **context, uint64_t comm_hash, int *mask, const char *comm_name, int num_nodes, int num_ranks,
              int rank, nccl_logger logger);
  start_function start;
  stop_function stop;
  state_function state;
  int (*finalize)(void *context);
};

#endif
