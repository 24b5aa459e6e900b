/* The exported structs ncclProfiler_v1 to _v7: each turns its descriptors into the facts that recorder.c takes. */
#define _GNU_SOURCE
#include <string.h>

#include "recorder.h"
#include "tape_layout.h"

#define EXPORTED __attribute__((visibility("default")))
#define NAME_IN(names, number) ((number) < sizeof(names) / sizeof(*(names)) ? (names)[number] : "unknown")

/* Version 1 has numbers where later ones have names. */
static const char *const functions_v1[] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                           "AllReduce", "SendRecv", "Send",      "Recv"};
static const char *const dtypes_v1[] = {"ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",
                                        "ncclInt64",   "ncclUint64",  "ncclFloat16", "ncclFloat32",
                                        "ncclFloat64", "ncclBfloat16"};
static const char *const algorithms_v1[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE",
                                            "PAT"};
static const char *const protocols_v1[] = {"LL", "LL128", "SIMPLE"};

/* NCCL passes root 0 for operations that have none. */
static bool has_root(const char *function) {
  static const char *const rooted[] = {"Broadcast", "Reduce", "Gather", "Scatter"};
  if (!function || *function == 'A') return false; /* AllReduce, AllGather, AlltoAll: most calls */
  for (size_t i = 0; i < sizeof rooted / sizeof *rooted; i++)
    if (*function == *rooted[i] && !strcmp(function, rooted[i])) return true;
  return false;
}

static struct call_facts collective(const char *function, const char *dtype, uint64_t seq, size_t count, int root,
                                    int rank) {
  return (struct call_facts){.function = function,
                             .dtype = dtype,
                             .seq = (int64_t)seq,
                             .count = (int64_t)count,
                             .root = has_root(function) ? root : UNSET_I32,
                             .peer = UNSET_I32,
                             .rank = rank,
                             .num_channels = UNSET_I32,
                             .has_kernel = true};
}

static struct call_facts point_to_point(const char *function, const char *dtype, size_t count, int peer, int rank) {
  struct call_facts facts = collective(function, dtype, 0, count, 0, rank);
  facts.seq = UNSET_I64;
  facts.root = UNSET_I32;
  facts.peer = peer;
  return facts;
}

static int start_v1(void *context, void **handle, void *descriptor) {
  const struct descriptor_v1 *event = descriptor;
  struct call_facts facts;
  *handle = NULL;
  switch (event->type) {
    case EVENT_GROUP: *handle = recorder_group(); break;
    case EVENT_COLL:
      facts = collective(NAME_IN(functions_v1, event->coll.function), NAME_IN(dtypes_v1, event->coll.dtype),
                         event->coll.seq, event->coll.count, event->coll.root, event->rank);
      facts.algorithm = NAME_IN(algorithms_v1, event->coll.algorithm);
      facts.protocol = NAME_IN(protocols_v1, event->coll.protocol);
      facts.comm_name = event->coll.name;
      facts.comm_hash = event->coll.comm_hash;
      facts.has_kernel = false;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_P2P:
      facts = point_to_point(NAME_IN(functions_v1, event->p2p.function), NAME_IN(dtypes_v1, event->p2p.dtype),
                             event->p2p.count, event->p2p.peer, event->rank);
      facts.comm_name = event->p2p.name;
      facts.comm_hash = event->p2p.comm_hash;
      facts.has_kernel = false;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_PROXY_OP: *handle = recorder_proxy_op(context, event->parent, &event->proxy_op); break;
    case EVENT_PROXY_STEP: *handle = recorder_proxy_step(event->parent, event->proxy_step.step); break;
    default: break;
  }
  return NCCL_SUCCESS;
}

static int start_v2(void *context, void **handle, void *descriptor) {
  const struct descriptor_v2 *event = descriptor;
  struct call_facts facts;
  *handle = NULL;
  switch (event->type) {
    case EVENT_GROUP: *handle = recorder_group(); break;
    case EVENT_COLL:
      facts = collective(event->coll.function, event->coll.dtype, event->coll.seq, event->coll.count,
                         event->coll.root, event->rank);
      facts.algorithm = event->coll.algorithm;
      facts.protocol = event->coll.protocol;
      facts.comm_name = event->coll.name;
      facts.comm_hash = event->coll.comm_hash;
      facts.has_kernel = false;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_P2P:
      facts = point_to_point(event->p2p.function, event->p2p.dtype, event->p2p.count, event->p2p.peer, event->rank);
      facts.comm_name = event->p2p.name;
      facts.comm_hash = event->p2p.comm_hash;
      facts.has_kernel = false;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_PROXY_OP: *handle = recorder_proxy_op(context, event->parent, &event->proxy_op); break;
    case EVENT_PROXY_STEP: *handle = recorder_proxy_step(event->parent, event->proxy_step.step); break;
    default: break;
  }
  return NCCL_SUCCESS;
}

static int start_v3(void *context, void **handle, void *descriptor) {
  const struct descriptor_v3 *event = descriptor;
  struct call_facts facts;
  *handle = NULL;
  switch (event->type) {
    case EVENT_GROUP: *handle = recorder_group(); break;
    case EVENT_COLL: /* its number of channels is a maximum: how many there are is not known */
      facts = collective(event->coll.function, event->coll.dtype, event->coll.seq, event->coll.count,
                         event->coll.root, event->rank);
      facts.algorithm = event->coll.algorithm;
      facts.protocol = event->coll.protocol;
      facts.comm_name = event->coll.name;
      facts.comm_hash = event->coll.comm_hash;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_P2P:
      facts = point_to_point(event->p2p.function, event->p2p.dtype, event->p2p.count, event->p2p.peer, event->rank);
      facts.comm_name = event->p2p.name;
      facts.comm_hash = event->p2p.comm_hash;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_PROXY_OP: *handle = recorder_proxy_op(context, event->parent, &event->proxy_op); break;
    case EVENT_PROXY_STEP: *handle = recorder_proxy_step(event->parent, event->proxy_step.step); break;
    case EVENT_KERNEL_CHANNEL:
      *handle = recorder_kernel(context, event->parent, event->kernel.channel, UNSET_I64);
      break;
    default: break;
  }
  return NCCL_SUCCESS;
}

static int start_newer(void *context, void **handle, const struct descriptor_v4 *event, uint64_t type) {
  struct call_facts facts;
  *handle = NULL;
  switch (type) {
    case EVENT_GROUP: *handle = recorder_group(); break;
    case EVENT_COLL:
      facts = collective(event->coll.function, event->coll.dtype, event->coll.seq, event->coll.count,
                         event->coll.root, event->rank);
      facts.algorithm = event->coll.algorithm;
      facts.protocol = event->coll.protocol;
      facts.num_channels = event->coll.num_channels;
      facts.counts_channels = true;
      facts.has_kernel = event->coll.num_channels > 0; /* further calls of one symmetric kernel have none */
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_P2P:
      facts = point_to_point(event->p2p.function, event->p2p.dtype, event->p2p.count, event->p2p.peer, event->rank);
      facts.num_channels = event->p2p.num_channels;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_CE_COLL:
      facts = collective(event->ce_coll.function, event->ce_coll.dtype, event->ce_coll.seq, event->ce_coll.count,
                         event->ce_coll.root, event->rank);
      facts.protocol = "CE";
      facts.has_kernel = false;
      *handle = recorder_call(context, &facts);
      break;
    case EVENT_PROXY_OP: *handle = recorder_proxy_op(context, event->parent, &event->proxy_op); break;
    case EVENT_PROXY_STEP: *handle = recorder_proxy_step(event->parent, event->proxy_step.step); break;
    case EVENT_KERNEL_CHANNEL:
      *handle = recorder_kernel(context, event->parent, event->kernel.channel, (int64_t)event->kernel.gpu_ns);
      break;
    default: break;
  }
  return NCCL_SUCCESS;
}

static int start_v4(void *context, void **handle, void *descriptor) {
  return start_newer(context, handle, descriptor, *(const uint8_t *)descriptor);
}

static int start_v5(void *context, void **handle, void *descriptor) {
  return start_newer(context, handle, descriptor, *(const uint64_t *)descriptor);
}

static int stop(void *handle) {
  recorder_stop(handle);
  return NCCL_SUCCESS;
}

static int state_v1(void *handle, int state, void *arguments) {
  const union state_arguments_v1 *values = arguments;
  bool is_op = values && state >= STATE_OP_SEND_POSTED && state <= STATE_OP_RECV_DONE;
  recorder_state(handle, state, UNSET_I64, is_op ? (int64_t)values->proxy_op.bytes : UNSET_I64,
                 is_op ? values->proxy_op.steps : UNSET_I64);
  return NCCL_SUCCESS;
}

static int state_v4(void *handle, int state, void *arguments) {
  const union state_arguments_v4 *values = arguments;
  bool is_stop = values && state == STATE_KERNEL_CHANNEL_STOP;
  bool is_step = values && ((state >= STATE_STEP_SEND_GPU_WAIT && state <= STATE_STEP_RECV_GPU_WAIT) ||
                            state == STATE_STEP_SEND_PEER_WAIT);
  recorder_state(handle, state, is_stop ? (int64_t)values->kernel.gpu_ns : UNSET_I64,
                 is_step ? (int64_t)values->proxy_step.bytes : UNSET_I64, UNSET_I64);
  return NCCL_SUCCESS;
}

static int finalize(void *context) {
  recorder_finalize(context);
  return NCCL_SUCCESS;
}

#define INIT_V1(version_number)                                                        \
  static int init_v##version_number(void **context, int *mask) {                       \
    struct communicator_facts facts = {.version = version_number, .num_ranks = -1};    \
    *context = recorder_begin(&facts, mask);                                           \
    return NCCL_SUCCESS;                                                               \
  }

#define INIT_BODY(version_number)                                                                         \
  struct communicator_facts facts = {.version = version_number, .name = comm_name, .hash = comm_hash,     \
                                     .num_nodes = num_nodes,    .num_ranks = num_ranks, .rank = rank,     \
                                     .logger = logger};                                                   \
  *context = recorder_begin(&facts, mask);                                                                \
  return NCCL_SUCCESS;

#define INIT_V5(version_number)                                                                              \
  static int init_v##version_number(void **context, uint64_t comm_hash, int *mask, const char *comm_name,    \
                                    int num_nodes, int num_ranks, int rank, nccl_logger logger) {            \
    INIT_BODY(version_number)                                                                                \
  }

INIT_V1(1)
INIT_V1(2)
INIT_V1(3)
static int init_v4(void **context, int *mask, const char *comm_name, uint64_t comm_hash, int num_nodes, int num_ranks,
                   int rank, nccl_logger logger) {
  INIT_BODY(4)
}
INIT_V5(5)
INIT_V5(6)
INIT_V5(7)

#define PROFILER(number, type, start_function, state_function) \
  EXPORTED const struct type ncclProfiler_v##number = {        \
      "rankscope", init_v##number, start_function, stop, state_function, finalize};

PROFILER(1, profiler_v1, start_v1, state_v1)
PROFILER(2, profiler_v1, start_v2, state_v1)
PROFILER(3, profiler_v1, start_v3, state_v1)
PROFILER(4, profiler_v4, start_v4, state_v4)
PROFILER(5, profiler_v5, start_v5, state_v4)
PROFILER(6, profiler_v5, start_v5, state_v4)
PROFILER(7, profiler_v5, start_v5, state_v4)
