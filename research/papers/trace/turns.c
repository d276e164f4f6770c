#include "turns.h"

#include "bits.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { NO_THREAD = -1, TIMEOUT_MS = 20 };

_Static_assert(TURNS_THREADS <= BITS, "each thread has a bit");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called[TURNS_THREADS] = {
    [0 ... TURNS_THREADS - 1] = PTHREAD_COND_INITIALIZER,
};
static bits waiting; /* under the lock, as lost is */
static uint64_t lost;
static atomic_int turn = NO_THREAD; /* changed under the lock */
static atomic_uint progress;

bool turns_mine(unsigned thread) {
    return atomic_load_explicit(&turn, memory_order_relaxed) == (int)thread;
}

void turns_progress(void) {
    (void)atomic_fetch_add_explicit(&progress, 1, memory_order_relaxed);
}

static struct timespec in_ms(long ms) {
    struct timespec when;
    (void)clock_gettime(CLOCK_REALTIME, &when);
    when.tv_nsec += ms * 1000000;
    when.tv_sec += when.tv_nsec / 1000000000;
    when.tv_nsec %= 1000000000;
    return when;
}

void turns_take(unsigned thread) {
    (void)pthread_mutex_lock(&lock);
    waiting |= bit_of(thread);
    while (turn != NO_THREAD && turn != (int)thread) {
        unsigned seen = progress;
        int holder = turn;
        struct timespec until = in_ms(TIMEOUT_MS);
        if (pthread_cond_timedwait(&called[thread], &lock, &until) == ETIMEDOUT && turn == holder &&
            progress == seen) {
            lost++;
            break;
        }
    }
    waiting &= ~bit_of(thread);
    turn = (int)thread;
    turns_progress();
    (void)pthread_mutex_unlock(&lock);
}

void turns_pass(unsigned thread) {
    (void)pthread_mutex_lock(&lock);
    if (turn == (int)thread) {
        /* The next in order after this one, and the first again after the last. */
        bits after = thread + 1 < TURNS_THREADS ? waiting & (~(bits)0 << (thread + 1)) : 0;
        bits among = after != 0 ? after : waiting;
        turn = NO_THREAD;
        if (among != 0) {
            turn = (int)lowest_bit(among);
            turns_progress();
            (void)pthread_cond_signal(&called[turn]);
        }
    }
    (void)pthread_mutex_unlock(&lock);
}

uint64_t turns_lost(void) {
    (void)pthread_mutex_lock(&lock);
    uint64_t count = lost;
    (void)pthread_mutex_unlock(&lock);
    return count;
}
