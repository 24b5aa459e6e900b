/* The clock of played devices: the plugin and the test share it, and only the test moves it.
 * The plugin is compiled with `-Dclock_gettime=played_clock_gettime` and linked to this. */
#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>

__attribute__((visibility("default"))) int64_t played_mono_ns;
__attribute__((visibility("default"))) int64_t played_wall_minus_mono_ns;

__attribute__((visibility("default"))) int played_clock_gettime(clockid_t clock, struct timespec *now);

int played_clock_gettime(clockid_t clock, struct timespec *now) {
  int64_t ns = __atomic_load_n(&played_mono_ns, __ATOMIC_RELAXED);
  if (clock == CLOCK_REALTIME) ns += played_wall_minus_mono_ns;
  now->tv_sec = ns / 1000000000;
  now->tv_nsec = ns % 1000000000;
  return 0;
}
