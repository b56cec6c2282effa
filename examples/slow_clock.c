/* A wall clock that is five minutes slow, for one process: the clock of a host without time synchronization.

   cc -shared -fPIC -o slow_clock.so slow_clock.c -ldl; LD_PRELOAD=$PWD/slow_clock.so date */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME)
        now->tv_sec -= 300;
    return result;
}
