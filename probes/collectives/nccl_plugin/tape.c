/* Segments of tapes: reserved on disk, mapped, replaced; see tape.h. */
#define _GNU_SOURCE
#include "tape.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tape_layout.h"

enum { SEALED_OFFSET = 16, DROPPED_OFFSET = 24, RETRY_RECORDS = 1024, PATIENCE = 2000, MAX_FILES = 1000000 };

struct tape_place tape_place;

static _Atomic uint32_t threads_seen;
static __thread uint32_t shard_of_thread; /* from 1; 0: not chosen yet */

static int64_t clock_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t tape_now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static size_t segment_bytes(const struct tape *tape) {
  return TAPE_HEADER_BYTES + ((size_t)tape->record_bytes << tape->shift);
}

static struct tape_shard *shard(struct tape *tape) {
  if (!shard_of_thread) shard_of_thread = 1 + atomic_fetch_add(&threads_seen, 1) % TAPE_SHARDS;
  return &tape->shards[shard_of_thread - 1];
}

/* Enter the slot of a segment; NULL if that segment is not mapped there. Whoever replaces a segment first takes its
 * index away and then waits for the users, so at least one of the two sees the other. */
static void *enter(struct tape *tape, int64_t number) {
  int64_t index = number >> tape->shift;
  int slot = (int)(index % TAPE_SLOTS);
  struct tape_segment *segment = &tape->segments[slot];
  _Atomic uint32_t *users = &shard(tape)->users[slot];
  atomic_fetch_add(users, 1);
  if (atomic_load(&segment->index) == index) {
    int64_t place = number & (((int64_t)1 << tape->shift) - 1);
    return segment->base + TAPE_HEADER_BYTES + place * tape->record_bytes;
  }
  atomic_fetch_sub(users, 1);
  return NULL;
}

void tape_release(struct tape *tape, int64_t number) {
  int slot = (int)((number >> tape->shift) % TAPE_SLOTS);
  atomic_fetch_sub_explicit(&shard(tape)->users[slot], 1, memory_order_release);
}

static bool is_unused(struct tape *tape, int slot) {
  for (int patience = 0; patience < PATIENCE; patience++) {
    uint32_t users = 0;
    for (int i = 0; i < TAPE_SHARDS; i++) users += atomic_load(&tape->shards[i].users[slot]);
    if (!users) return true;
    sched_yield();
  }
  return false;
}

static size_t write_header(const struct tape *tape, int64_t index, int number, uint8_t *base) {
  static const uint8_t magic[8] = TAPE_MAGIC_BYTES;
  char text[TAPE_HEADER_BYTES - TAPE_JSON_OFFSET];
  int length = snprintf(
      text, sizeof text,
      "{\"table\":\"%s\",\"rank\":%d,\"attempt\":%d,\"segment\":%d,\"first_record\":%lld,\"capacity\":%lld,"
      "\"record_bytes\":%u,\"state_offset\":%u,\"fields\":%s,\"pid\":%d,\"mono_ns\":%lld,\"wall_ns\":%lld}",
      tape->table, tape_place.rank, tape_place.attempt, number, (long long)(index << tape->shift),
      1LL << tape->shift, tape->record_bytes, tape->record_bytes - 1, tape->fields, (int)getpid(),
      (long long)tape_now_ns(), (long long)clock_ns(CLOCK_REALTIME));
  if (length < 0 || (size_t)length >= sizeof text) return 0;
  uint32_t version = TAPE_SCHEMA_VERSION, json_bytes = (uint32_t)length;
  int64_t dropped = atomic_load(&tape->dropped);
  memcpy(base + TAPE_JSON_OFFSET, text, (size_t)length);
  memcpy(base + DROPPED_OFFSET, &dropped, sizeof dropped);
  memcpy(base + 12, &json_bytes, sizeof json_bytes);
  memcpy(base + 8, &version, sizeof version);
  memcpy(base, magic, sizeof magic);
  return (size_t)length;
}

/* A new file, reserved on disk before it is mapped: a store to a sparse page of a full disk is a SIGBUS. */
static uint8_t *make_segment(struct tape *tape, int64_t index) {
  char path[sizeof tape_place.directory + 128];
  int file = -1;
  for (; tape->file_number < MAX_FILES; tape->file_number++) {
    snprintf(path, sizeof path, "%s/%s.%05d.tape", tape_place.directory, tape->table, tape->file_number);
    file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file >= 0 || errno != EEXIST) break; /* an earlier process wrote to this folder: continue after its files */
  }
  if (file < 0) return NULL;
  size_t size = segment_bytes(tape);
  uint8_t *base = MAP_FAILED;
  if (!posix_fallocate(file, 0, (off_t)size)) base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED || !write_header(tape, index, tape->file_number, base)) {
    if (base != MAP_FAILED) munmap(base, size);
    unlink(path);
    return NULL;
  }
#ifdef MADV_POPULATE_WRITE
  madvise(base, size, MADV_POPULATE_WRITE); /* all pages at once, not one fault for every few records */
#endif
  tape->file_number++;
  return base;
}

/* Map the segment of `number`, with the lock held; false if that is refused. */
static bool replace_segment(struct tape *tape, int64_t number) {
  int64_t index = number >> tape->shift;
  int slot = (int)(index % TAPE_SLOTS);
  struct tape_segment *segment = &tape->segments[slot];
  if (atomic_load(&segment->index) >= index) return true;
  if (number < tape->retry_at) return false;
  int64_t before = atomic_exchange(&segment->index, -1);
  if (!is_unused(tape, slot)) {
    atomic_store(&segment->index, before);
    return false;
  }
  if (before >= 0) {
    uint64_t sealed = 1;
    memcpy(segment->base + SEALED_OFFSET, &sealed, sizeof sealed);
    munmap(segment->base, segment_bytes(tape));
  }
  segment->base = make_segment(tape, index);
  if (!segment->base) {
    tape->retry_at = number + RETRY_RECORDS;
    return false;
  }
  tape->retry_at = 0;
  atomic_store(&segment->index, index);
  return true;
}

static void count_dropped(struct tape *tape) {
  int64_t dropped = atomic_fetch_add(&tape->dropped, 1) + 1;
  int64_t current = atomic_load(&tape->current);
  if (current < 0) return;
  int64_t first = current << tape->shift;
  uint8_t *record = enter(tape, first);
  if (!record) return;
  __atomic_store_n((int64_t *)(record - TAPE_HEADER_BYTES + DROPPED_OFFSET), dropped, __ATOMIC_RELAXED);
  tape_release(tape, first);
}

static bool map_segment(struct tape *tape, int64_t number) {
  pthread_mutex_lock(&tape->lock);
  bool is_mapped = replace_segment(tape, number);
  pthread_mutex_unlock(&tape->lock);
  return is_mapped;
}

static struct tape *const *prepared_tapes;
static int num_prepared_tapes;
static sem_t wake;

static void *prepare_segments(void *unused) {
  for (;;) {
    while (sem_wait(&wake)) {
    }
    for (int i = 0; i < num_prepared_tapes; i++) {
      struct tape *tape = prepared_tapes[i];
      int64_t wanted = atomic_exchange(&tape->wanted, 0);
      for (int64_t index = wanted > 2 ? wanted - 1 : wanted; index && index <= wanted; index++)
        map_segment(tape, index << tape->shift);
    }
  }
  return unused;
}

void tape_start(struct tape *const *tapes, int num_tapes) {
  pthread_t thread;
  pthread_attr_t attributes;
  sigset_t all, before;
  prepared_tapes = tapes;
  num_prepared_tapes = num_tapes;
  if (sem_init(&wake, 0, 0) || pthread_attr_init(&attributes)) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigfillset(&all); /* the application's signals are for its own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&thread, &attributes, prepare_segments, NULL)) num_prepared_tapes = 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
}

/* The first record of a segment makes it the current one, the middle one asks for the next two, so that a burst of calls
 * finds its segments mapped; the first segment asks for one, so that a short run has no more on its disk. */
static void mark_progress(struct tape *tape, int64_t number) {
  int64_t index = number >> tape->shift, known = atomic_load(&tape->current);
  int64_t half = (int64_t)1 << (tape->shift - 1);
  while (known < index && !atomic_compare_exchange_weak(&tape->current, &known, index)) {
  }
  if ((number & (half * 2 - 1)) != half || !num_prepared_tapes) return;
  atomic_store(&tape->wanted, index + (index ? 2 : 1));
  sem_post(&wake);
}

void *tape_append(struct tape *tape, int64_t *number) {
  *number = atomic_fetch_add_explicit(&tape->next, 1, memory_order_relaxed);
  void *record = enter(tape, *number);
  if (!(*number & (((int64_t)1 << (tape->shift - 1)) - 1))) mark_progress(tape, *number);
  if (record) return record;
  if (map_segment(tape, *number)) record = enter(tape, *number);
  if (!record) count_dropped(tape);
  return record;
}

void *tape_record(struct tape *tape, int64_t number) {
  if (number < 0 || (number >> tape->shift) + 1 < atomic_load_explicit(&tape->current, memory_order_relaxed))
    return NULL; /* older than the reader looks */
  return enter(tape, number);
}

void tape_set_state(struct tape *tape, void *record, uint8_t state) {
  __atomic_store_n((uint8_t *)record + tape->record_bytes - 1, state, __ATOMIC_RELEASE);
}

uint8_t tape_state(struct tape *tape, void *record) {
  return __atomic_load_n((uint8_t *)record + tape->record_bytes - 1, __ATOMIC_ACQUIRE);
}
