/* The table of names and the cache of constants; see names.h. */
#define _GNU_SOURCE
#include "names.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "tape_layout.h"

enum { MAX_NAMES = 2048, NAME_BYTES = 120, CACHE_SIZE = 256, CACHE_PROBES = 8 };

struct cached {
  _Atomic(const char *) address;
  uint32_t name; /* index into `texts`, plus `first_number` */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char texts[MAX_NAMES][NAME_BYTES];
static uint32_t num_texts;
static uint32_t first_number = 1; /* a process that recorded here before us has taken the numbers below */
static int file = -1;
static bool is_torn; /* the file's last line lacks its newline: a full disk cut it off, or a process ended in it */
static struct cached cache[CACHE_SIZE];

static void count_lines(void) {
  char block[4096];
  ssize_t size;
  while ((size = read(file, block, sizeof block)) > 0) {
    for (ssize_t i = 0; i < size; i++) first_number += block[i] == '\n';
    is_torn = block[size - 1] != '\n';
  }
}

bool names_open(const char *directory) {
  char path[4096];
  if (snprintf(path, sizeof path, "%s/" TAPE_NAMES_FILE, directory) >= (int)sizeof path) return false;
  file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file < 0) return false;
  if (flock(file, LOCK_EX | LOCK_NB)) {
    close(file);
    file = -1;
    return false;
  }
  count_lines();
  return true;
}

static bool write_line(uint32_t number, const char *text) {
  char line[NAME_BYTES * 6 + 64];
  int length = snprintf(line, 48, "%s{\"id\": %u, \"name\": \"", is_torn ? "\n" : "", number);
  for (const char *at = text; *at; at++) {
    unsigned char byte = (unsigned char)*at;
    if (byte == '"' || byte == '\\' || byte < 0x20)
      length += snprintf(line + length, 8, "\\u%04x", byte);
    else
      line[length++] = byte < 0x7f ? (char)byte : '?';
  }
  memcpy(line + length, "\"}\n", 3);
  ssize_t written = write(file, line, (size_t)length + 3);
  if (written > 0) is_torn = written != length + 3;
  return written == length + 3;
}

uint32_t name_of_text(const char *text) {
  if (!text || !*text) return UNSET_NAME;
  char copy[NAME_BYTES];
  snprintf(copy, sizeof copy, "%s", text);
  uint32_t number = UNSET_NAME;
  pthread_mutex_lock(&lock);
  for (uint32_t i = 0; i < num_texts && !number; i++)
    if (!strcmp(texts[i], copy)) number = first_number + i;
  if (!number && num_texts < MAX_NAMES && file >= 0 && write_line(first_number + num_texts, copy)) {
    memcpy(texts[num_texts], copy, sizeof copy);
    number = first_number + num_texts++;
  }
  pthread_mutex_unlock(&lock);
  return number;
}

uint32_t name_of_constant(const char *text) {
  if (!text) return UNSET_NAME;
  size_t start = ((uintptr_t)text >> 2) % CACHE_SIZE;
  for (size_t i = 0; i < CACHE_PROBES; i++) {
    struct cached *entry = &cache[(start + i) % CACHE_SIZE];
    const char *address = atomic_load_explicit(&entry->address, memory_order_acquire);
    if (address == text && !strcmp(texts[entry->name - first_number], text)) return entry->name;
    if (!address) break;
  }
  uint32_t number = name_of_text(text);
  if (!number) return UNSET_NAME;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < CACHE_PROBES; i++) {
    struct cached *entry = &cache[(start + i) % CACHE_SIZE];
    if (atomic_load(&entry->address) == text) break;
    if (atomic_load(&entry->address)) continue;
    entry->name = number;
    atomic_store_explicit(&entry->address, text, memory_order_release);
    break;
  }
  pthread_mutex_unlock(&lock);
  return number;
}
