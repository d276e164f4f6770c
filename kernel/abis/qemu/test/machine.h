/* The bare machine that the checks run on: its console, page tables, two CPUs, and operations that may fault.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include "layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096UL

/* Flags of page table entries. */
#define PRESENT    (1UL << 0)
#define WRITABLE   (1UL << 1)
#define USER       (1UL << 2)
#define ACCESSED   (1UL << 5)
#define DIRTY      (1UL << 6)
#define KEY(key)   ((uint64_t)(key) << 59)
#define NO_EXECUTE (1UL << 63)

#define CR0_WP      (1UL << 16)
#define CR0_PG      (1UL << 31)
#define CR3_NOFLUSH (1UL << 63)
#define CR4_PCIDE   (1UL << 17)
#define CR4_SMEP    (1UL << 20)
#define CR4_SMAP    (1UL << 21)
#define CR4_PKE     (1UL << 22)

enum vector { INVALID_OPCODE = 6, PROTECTION = 13, PAGE_FAULT = 14 };
/* Error codes of page faults. */
enum { FAULT_PRESENT = 1, FAULT_WRITE = 2, FAULT_USER = 4, FAULT_FETCH = 16, FAULT_KEY = 32 };

enum mode { IN_KERNEL, IN_USER };

/* A CPU's own; start.S knows the offsets. */
struct cpu {
    uint64_t saved_stack;
    uint64_t value;
    uint64_t vector;
    uint64_t error;
    uint64_t address;
};

typedef void operation(void);

/* In start.S. What they take is given to attempt(). */
extern operation kernel_read, kernel_read_ac, kernel_write, kernel_write_ac, kernel_execute, set_cr0, set_cr3,
    set_cr4, do_invpcid, tlbins, tlbins_register, tlbins_other_reg, tlbins_66, tlbins_f2, tlbins_f3,
    tlbins_lock, tlbins_far, tlbins_fs;
extern operation user_read, user_write, user_execute, user_invpcid, user_tlbins;
uint64_t attempt(operation *what, uint64_t a, uint64_t b, enum mode mode);

/* Where user mode's own copies of its operations are. */
operation *in_user_page(operation *what);

/* Two hierarchies for the same addresses, but for those of the last level of one region, 2 MiB from REGION
 * on. Each has a table of its own for these. */
#define REGION 0x8000000000UL
enum hierarchy { PRIMARY, SECONDARY, HIERARCHIES };
/* Of the page of that number in the region. */
uint64_t *entry_of(enum hierarchy hierarchy, unsigned page);
/* Its root, for CR3. */
uint64_t root_of(enum hierarchy hierarchy);
static inline uint64_t address_of(unsigned page) {
    return REGION + page * PAGE;
}

/* Frames that nothing else uses. */
enum { FRAMES = 8 };
uint64_t *frame_of(unsigned number);

/* Words of the command line. */
bool told(const char *word);

void print(const char *text);
void print_number(uint64_t number);
_Noreturn void leave(bool well);

/* Of the CPU that asks. */
struct cpu *this_cpu(void);

/* Has the second CPU run a job; wait_for_job() returns when it is done. */
void give_job(void (*job)(void));
void wait_for_job(void);

uint64_t read_msr(uint32_t number);
void write_msr(uint32_t number, uint64_t value);

static inline uint64_t read_cr0(void) {
    uint64_t value;
    __asm__ volatile("mov %%cr0, %0" : "=r"(value));
    return value;
}
static inline uint64_t read_cr3(void) {
    uint64_t value;
    __asm__ volatile("mov %%cr3, %0" : "=r"(value));
    return value;
}
static inline uint64_t read_cr4(void) {
    uint64_t value;
    __asm__ volatile("mov %%cr4, %0" : "=r"(value));
    return value;
}
static inline void write_cr0(uint64_t value) {
    __asm__ volatile("mov %0, %%cr0" : : "r"(value) : "memory");
}
static inline void write_cr3(uint64_t value) {
    __asm__ volatile("mov %0, %%cr3" : : "r"(value) : "memory");
}
static inline void write_cr4(uint64_t value) {
    __asm__ volatile("mov %0, %%cr4" : : "r"(value) : "memory");
}
static inline void invalidate(uint64_t address) {
    __asm__ volatile("invlpg (%0)" : : "r"(address) : "memory");
}
static inline void write_pkru(uint32_t value) {
    __asm__ volatile("wrpkru" : : "a"(value), "c"(0), "d"(0) : "memory");
}
static inline void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]) {
    __asm__ volatile("cpuid"
                     : "=a"(registers[0]), "=b"(registers[1]), "=c"(registers[2]), "=d"(registers[3])
                     : "a"(leaf), "c"(subleaf));
}

#endif
