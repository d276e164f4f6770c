#include "profile/unwind.h"

#include "os/address_space.h"
#include "os/syscall.h"
#include "profile/cfi.h"

#include <errno.h>
#include <link.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/auxv.h>
#include <time.h>

/* No frame is longer than what a thread's whole stack usually is. */
#define FRAME_BYTES_MOST ((uintptr_t)16 << 20)

/* The page that was last found to be readable. */
struct probe {
    uintptr_t page;
    uintptr_t page_bytes;
};

/*
 * Asks the kernel to compare a word: it says EFAULT where there is none. It never waits: the word is hardly
 * the one it is compared to, and the time to wait is zero.
 */
static bool is_readable(struct probe *probe, uintptr_t address) {
    uintptr_t page = address & ~(probe->page_bytes - 1);
    if (page == probe->page) {
        return true;
    }
    struct timespec none = {0, 0};
    uintptr_t word = address & ~(uintptr_t)3;
    if (os_syscall(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, 0x5a4d9b17, (long)&none, 0, 0) == -EFAULT) {
        return false;
    }
    probe->page = page;
    return true;
}

/* A word of the stack: what lies there is others' variables, which sanitizers guard. */
__attribute__((no_sanitize("address", "thread"))) static bool load(void *context, uintptr_t address,
                                                                   uintptr_t *word) {
    if (address % sizeof *word != 0 || address < 4096 || !is_readable(context, address)) {
        return false;
    }
    *word = *(const volatile uintptr_t *)address;
    return true;
}

/* A caller's frame, by frame pointers: the frame pointer points at the caller's, and the return address. */
static bool step_by_frame_pointer(struct probe *probe, uintptr_t *frame_pointer, uintptr_t *stack_pointer,
                                  uintptr_t *address) {
    uintptr_t frame = *frame_pointer;
    uintptr_t next;
    uintptr_t back;
    if (frame < *stack_pointer || frame - *stack_pointer > FRAME_BYTES_MOST || !load(probe, frame, &next) ||
        !load(probe, frame + sizeof next, &back) || back == 0) {
        return false;
    }
    *stack_pointer = frame + 2 * sizeof next;
    *frame_pointer = next;
    *address = back;
    return true;
}

/* The modules loaded by the time that unwind_learn_modules was called, for where the C library does not say.
 */
#define MODULES_MOST 256

static struct cfi_module modules[MODULES_MOST];
static _Atomic(size_t) module_count;

#if defined(__GLIBC__)
#if __GLIBC_PREREQ(2, 35)
#define HAVE_FIND_OBJECT 1
/* Weak: the library also runs with older ones. */
extern __typeof__(_dl_find_object) _dl_find_object __attribute__((weak));

/* The C library of a static program allocates before it can find objects, and is done with that before the
 * constructors. */
static _Atomic(bool) constructed;

__attribute__((constructor)) static void note_constructors(void) {
    atomic_store_explicit(&constructed, true, memory_order_relaxed);
}

static bool can_find_objects(void) {
    return atomic_load_explicit(&constructed, memory_order_relaxed) || getauxval(AT_BASE) != 0;
}
#endif
#endif

static bool find_module(uintptr_t address, struct cfi_module *module) {
#if defined(HAVE_FIND_OBJECT)
    if (_dl_find_object != NULL) {
        struct dl_find_object found;
        if (!can_find_objects() || _dl_find_object((void *)address, &found) != 0) {
            return false;
        }
        *module = (struct cfi_module){.start = (uintptr_t)found.dlfo_map_start,
                                      .end = (uintptr_t)found.dlfo_map_end,
                                      .tables = (uintptr_t)found.dlfo_eh_frame};
        if (module->tables - module->start >= module->end - module->start) {
            /* Of a static program glibc knows only the code's bounds. */
            module->start = 0;
            module->end = UINTPTR_MAX;
        }
        return true;
    }
#endif
    size_t count = atomic_load_explicit(&module_count, memory_order_acquire);
    for (size_t i = 0; i < count; i++) {
        if (address - modules[i].start < modules[i].end - modules[i].start) {
            *module = modules[i];
            struct probe probe = {.page_bytes = os_page_size()};
            return is_readable(&probe, module->tables);
        }
    }
    return false;
}

/* Modules are only added: one that is unloaded leaves an entry that no address of a running function meets,
 * until another is loaded there. */
static int learn_module(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size, (void)context;
    struct cfi_module module = {.start = UINTPTR_MAX};
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_LOAD) {
            module.start = start < module.start ? start : module.start;
            module.end = start + header->p_memsz > module.end ? start + header->p_memsz : module.end;
        } else if (header->p_type == PT_GNU_EH_FRAME) {
            module.tables = start;
        }
    }
    size_t count = atomic_load_explicit(&module_count, memory_order_relaxed);
    for (size_t i = 0; i < count; i++) {
        if (modules[i].start == module.start) {
            return 0;
        }
    }
    if (module.tables != 0 && count < MODULES_MOST) {
        modules[count] = module;
        atomic_store_explicit(&module_count, count + 1, memory_order_release);
    }
    return 0;
}

/* The loader's lock keeps two of these apart. */
void unwind_learn_modules(void) {
#if defined(HAVE_FIND_OBJECT)
    if (_dl_find_object != NULL) {
        return;
    }
#endif
    dl_iterate_phdr(learn_module, NULL);
}

/* Where this library's code lies; nothing if it is part of the program itself. */
static struct cfi_module own_module(void) {
    struct cfi_module own;
    if (!find_module((uintptr_t)unwind_here, &own) || getauxval(AT_ENTRY) - own.start < own.end - own.start) {
        return (struct cfi_module){0};
    }
    return own;
}

int unwind_hides_itself(void) {
    return own_module().end != 0;
}

#if defined(__x86_64__)

static bool step(struct probe *probe, struct cfi_registers *registers) {
    struct cfi_module module;
    uintptr_t stack_pointer = registers->of[CFI_RSP];
    if (find_module(registers->of[CFI_RIP] - !registers->in_signal, &module) && module.tables != 0) {
        bool in_signal = registers->in_signal;
        switch (cfi_step(&module, registers, load, probe)) {
        case CFI_STEPPED:
            /* Upwards, but for a handler on a stack of its own. */
            return registers->of[CFI_RIP] != 0 &&
                   (registers->in_signal || in_signal ||
                    (registers->of[CFI_RSP] > stack_pointer &&
                     registers->of[CFI_RSP] - stack_pointer <= FRAME_BYTES_MOST));
        case CFI_OUTERMOST:
            return false;
        case CFI_UNKNOWN:
            break;
        }
    }
    registers->in_signal = false;
    return step_by_frame_pointer(probe, &registers->of[CFI_RBP], &registers->of[CFI_RSP],
                                 &registers->of[CFI_RIP]);
}

__attribute__((noinline)) size_t unwind_here(uintptr_t *addresses, size_t most) {
    struct probe probe = {.page_bytes = os_page_size()};
    struct cfi_registers registers = {.in_signal = true}; /* rip is not behind a call */
    struct cfi_module own = own_module();
    /* All at one moment, of which the tables tell. */
    __asm__ volatile("leaq 0(%%rip), %%rax\n\t"
                     "movq %%rax, %c[rip](%[registers])\n\t"
                     "movq %%rsp, %c[rsp](%[registers])\n\t"
                     "movq %%rbp, %c[rbp](%[registers])\n\t"
                     "movq %%rbx, %c[rbx](%[registers])\n\t"
                     "movq %%r12, %c[r12](%[registers])\n\t"
                     "movq %%r13, %c[r13](%[registers])\n\t"
                     "movq %%r14, %c[r14](%[registers])\n\t"
                     "movq %%r15, %c[r15](%[registers])\n\t"
                     :
                     : [registers] "r"(registers.of), [rip] "i"(8 * CFI_RIP), [rsp] "i"(8 * CFI_RSP),
                       [rbp] "i"(8 * CFI_RBP), [rbx] "i"(8 * 3), [r12] "i"(8 * 12), [r13] "i"(8 * 13),
                       [r14] "i"(8 * 14), [r15] "i"(8 * 15)
                     : "rax", "memory");
    size_t count = 0;
    struct cfi_module first;
    if (!find_module(registers.of[CFI_RIP], &first) || first.tables == 0) {
        return 0; /* this library keeps no frame pointers to go by: a static program, linked without the
                     tables */
    }
    while (count < most && step(&probe, &registers)) {
        uintptr_t address = registers.of[CFI_RIP];
        if (count > 0 || address - own.start >= own.end - own.start) {
            /* pprof looks for what is before a return address; what a signal struck is meant itself. */
            addresses[count++] = address + registers.in_signal;
        }
    }
    return count;
}

#else

/* Without what pointer authentication puts into the upper bits. */
#define ADDRESS_BITS (((uintptr_t)1 << 48) - 1)

__attribute__((noinline)) size_t unwind_here(uintptr_t *addresses, size_t most) {
    struct probe probe = {.page_bytes = os_page_size()};
    struct cfi_module own = own_module();
    uintptr_t frame_pointer = (uintptr_t)__builtin_frame_address(0);
    uintptr_t stack_pointer = frame_pointer;
    uintptr_t address;
    size_t count = 0;
    while (count < most && step_by_frame_pointer(&probe, &frame_pointer, &stack_pointer, &address)) {
        address &= ADDRESS_BITS;
        if (count > 0 || address - own.start >= own.end - own.start) {
            addresses[count++] = address;
        }
    }
    return count;
}

#endif
