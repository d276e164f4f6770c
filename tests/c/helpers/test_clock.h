/*
 * Time that a test drives, for programs linked with calm_drive_clock() (CMakeLists.txt).
 *
 * After clock_stop() the clocks of os/clock.h stand still, and waits of os/futex.h end by a wake or when
 * clock_advance() reaches their timeout. Locks are not concerned. Until then all is as without this file. A
 * forked child has the time of its parent, and none of its threads.
 */
#ifndef CALM_TESTS_TEST_CLOCK_H
#define CALM_TESTS_TEST_CLOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CLOCK_MS 1000000ULL

/* From now on the test drives time: monotonic clocks go on from what they say, CPU clocks from 1 s. */
void clock_stop(void);

/* Time passes, at once. Ends waits whose timeout is over. */
void clock_advance(uint64_t ns);

/* CPU time is used: by the process, and by any thread that asks for its own. */
void clock_use_cpu(uint64_t process_ns, uint64_t thread_ns);

/* Each reading of a monotonic clock moves it by so much; ends no wait. */
void clock_set_step(uint64_t ns);

/* The same of the thread's CPU clock. */
void clock_set_cpu_step(uint64_t ns);

/* Readings of a monotonic clock since clock_stop(). */
uint64_t clock_readings(void);

/* Whether a thread sleeps on the word, with a timeout or without. */
enum clock_sleep { AWAKE, ASLEEP_FOR_A_WHILE, ASLEEP_FOR_GOOD };
enum clock_sleep clock_sleep_of(const _Atomic(uint32_t) *word);

/* Waits until a thread sleeps on the word. */
void clock_await_sleep(const _Atomic(uint32_t) *word);

#endif
