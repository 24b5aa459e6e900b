/* Tapes: append-only files of fixed-size records, written through shared mappings; format of probes/tape/format/writer.py.
 *
 * A record's number is its place over all segments of a tape. Appending and updating take no lock. A thread of ours
 * maps the next two segments when half of one is used; only a caller that is faster than that takes the lock and maps
 * one itself. At most TAPE_SLOTS segments of a tape are mapped, so memory is bounded; a record can be updated as long as it
 * lies in the segment that is being appended to or in the one before, as the reader expects.
 */
#ifndef RANKSCOPE_TAPE_H
#define RANKSCOPE_TAPE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { TAPE_SLOTS = 4, TAPE_SHARDS = 16 };

struct tape_segment {
  _Atomic int64_t index; /* which segment of the tape this maps; -1: none */
  uint8_t *base;
};

struct tape_shard { /* numbers of threads inside each segment, for some of the threads; fills a cache line */
  _Alignas(64) _Atomic uint32_t users[TAPE_SLOTS];
};

struct tape {
  const char *table;
  const char *fields;
  uint32_t record_bytes;
  uint32_t shift; /* records of a segment: 1 << shift */
  int file_number;
  int64_t retry_at; /* after a refused reservation: the record at which to try again */
  pthread_mutex_t lock;
  struct tape_segment segments[TAPE_SLOTS];
  struct tape_shard shards[TAPE_SHARDS];
  _Alignas(64) _Atomic int64_t next;
  _Alignas(64) _Atomic int64_t current; /* index of the segment that is being appended to; -1: none */
  _Atomic int64_t wanted;               /* index of the last segment to be mapped in advance; 0: none */
  _Atomic int64_t dropped;
};

/* Where tapes are written and what their headers say; set once, before the first record. */
struct tape_place {
  char directory[3072];
  int rank;
  int attempt;
};
extern struct tape_place tape_place;

int64_t tape_now_ns(void);

/* Start the thread that maps segments in advance. Without it all works, and the callers map them. */
void tape_start(struct tape *const *tapes, int num_tapes);

/* The record `number` for reading and writing, or NULL if it cannot be written (any more). A record that is not NULL
 * has to be released by `tape_release` with the same number. */
void *tape_append(struct tape *tape, int64_t *number);
void *tape_record(struct tape *tape, int64_t number);
void tape_release(struct tape *tape, int64_t number);

/* Mark a record as begun or finished: all that was stored to it before is visible to a reader that sees the state. */
void tape_set_state(struct tape *tape, void *record, uint8_t state);
uint8_t tape_state(struct tape *tape, void *record);

#endif
