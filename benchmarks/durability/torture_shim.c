/* Loaded into a run's processes by LD_PRELOAD: shifts the wall clock, and fails operations on paths that contain a text.
 *
 *   cc -O2 -shared -fPIC -o shim.so torture_shim.c -ldl
 *   RS_TORTURE=control LD_PRELOAD=./shim.so program
 *
 * `control` is a file of 256 bytes that the caller changes while the program runs: nanoseconds added to the wall clock
 * (int64), errno to return (int32; 0: none), operations that return it (int32: 1 read, 2 write, 4 create and rename),
 * and the text (zero-terminated). The monotonic clock is unchanged, as when an administrator sets the time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, MAKE = 4 };
struct control {
    volatile int64_t offset_ns;
    volatile int32_t error;
    volatile int32_t operations;
    char part[240];
};
static struct control none, *control = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RS_TORTURE");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) control = found;
    syscall(SYS_close, fd);
}

static int refused(int operation) { return control->error && (control->operations & operation); }
static int path_fails(int operation, const char *path) {
    if (!refused(operation) || !path || !strstr(path, control->part)) return 0;
    errno = control->error;
    return 1;
}
static int file_fails(int operation, int fd) {
    if (!refused(operation)) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return path_fails(operation, path);
}
static int open_fails(int dir, const char *path, int flags) {
    int operation = (flags & O_CREAT) ? MAKE : (flags & O_ACCMODE) != O_RDONLY ? WRITE : 0;
    if (!operation || !refused(operation)) return 0;
    if (path[0] != '/' && dir != AT_FDCWD) return file_fails(operation, dir);
    return path_fails(operation, path);
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME && !result) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + control->offset_ns;
        now->tv_sec = ns / 1000000000LL, now->tv_nsec = ns % 1000000000LL;
    }
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

#define OPEN(name)                                                                                       \
    int name(const char *path, int flags, ...) {                                                         \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list);           \
        return open_fails(AT_FDCWD, path, flags) ? -1 : REAL(name)(path, flags, mode);                   \
    }
#define OPENAT(name)                                                                                     \
    int name(int dir, const char *path, int flags, ...) {                                                \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list);           \
        return open_fails(dir, path, flags) ? -1 : REAL(name)(dir, path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ssize_t read(int fd, void *data, size_t size) { return file_fails(READ, fd) ? -1 : REAL(read)(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return file_fails(READ, fd) ? -1 : REAL(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    return file_fails(READ, fd) ? -1 : REAL(pread64)(fd, data, size, at);
}
ssize_t write(int fd, const void *data, size_t size) {
    return file_fails(WRITE, fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return file_fails(WRITE, fd) ? -1 : REAL(writev)(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return file_fails(WRITE, fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return file_fails(WRITE, fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int posix_fallocate(int fd, off_t at, off_t size) {
    return file_fails(WRITE, fd) ? control->error : REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    return file_fails(WRITE, fd) ? control->error : REAL(posix_fallocate64)(fd, at, size);
}
int rename(const char *from, const char *to) { return path_fails(MAKE, to) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return path_fails(MAKE, to) ? -1 : REAL(link)(from, to); }
int mkdir(const char *path, mode_t mode) { return path_fails(MAKE, path) ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return path_fails(MAKE, path) ? -1 : REAL(unlink)(path); }
