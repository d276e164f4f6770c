/* What the traced program is told of the model's CPUs, instead of those of the machine that QEMU runs on: how
 * many there are, the CPU and node of each thread, and the CPU time of the process. No two threads have the
 * same CPU. Called by the plugin, which serializes the calls.
 *
 * The program is told by writes to its memory, after the system calls that ask for such things. What it reads
 * from files must be given to QEMU in a folder (-L). Restartable sequences, which QEMU refuses to register,
 * are imitated by libcalm-trace-sequences.so. */
#ifndef CALM_TRACE_TOPOLOGY_H
#define CALM_TRACE_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TOPOLOGY_THREADS = 128 };

/* The number of CPUs; 0 nodes are one. */
void topology_init(unsigned cpus, unsigned nodes);

/* The distance from an address of the program to where it is in this process. */
void topology_set_base(ptrdiff_t base);

/* Before and after each system call of a thread. */
void topology_called(unsigned thread, int64_t number, const uint64_t arguments[3]);
void topology_returned(unsigned thread, int64_t number, int64_t result);

/* After each store of a thread. The C library stores into an area that QEMU did not register that it is not:
 * the numbers of the CPU and node are put there at that moment, before any other code can look. */
void topology_stored(unsigned thread, uint64_t address);

/* Of the thread's CPU: its number modulo that of the nodes. */
unsigned topology_node(unsigned thread);

/* Stores the CPU's number in each area for restartable sequences anew, as the kernel does when it interrupts
 * a thread: tcmalloc keeps a pointer in its place. */
void topology_renew(void);

/* Another thread may have this one's CPU. */
void topology_thread_ended(unsigned thread);

/* A system call after which no sequence may be under way that began before it. */
bool topology_is_restart(int64_t number, uint64_t command);

#endif
