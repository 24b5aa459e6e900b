/* What the plugin does with events, whatever the version of the interface that they came through. */
#ifndef RANKSCOPE_RECORDER_H
#define RANKSCOPE_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "nccl_interface.h"

/* What is known of a communicator when it begins; negative and NULL: not known. */
struct communicator_facts {
  int version;
  const char *name;
  uint64_t hash;
  int num_nodes;
  int num_ranks;
  int rank;
  nccl_logger logger;
};

/* A call as a descriptor of any version states it. */
struct call_facts {
  const char *function, *dtype, *algorithm, *protocol;
  const char *comm_name; /* up to version 3 each call names its communicator */
  uint64_t comm_hash;
  int64_t seq; /* NCCL's, or UNSET_I64 */
  int64_t count;
  int root, peer, rank;
  int num_channels;    /* UNSET_I32: not known */
  bool counts_channels; /* the call is complete when so many channels have stopped */
  bool has_kernel;
};

void *recorder_begin(const struct communicator_facts *facts, int *mask);
void recorder_finalize(void *context);

/* Each returns the handle of the event, NULL where nothing is recorded. */
void *recorder_group(void);
void *recorder_call(void *context, const struct call_facts *facts);
void *recorder_kernel(void *context, void *call, int channel, int64_t gpu_ns);
void *recorder_proxy_op(void *context, void *call, const struct proxy_op_fields *fields);
void *recorder_proxy_step(void *op, int step);

void recorder_stop(void *handle);

/* Progress of an operation or a step; `gpu_ns`, `bytes` and `steps` are UNSET_I64 where the state has none. */
void recorder_state(void *handle, int state, int64_t gpu_ns, int64_t bytes, int64_t steps);

#endif
