#include "profile/unwind.h"

#include "os/syscall.h"
#include "os/vm.h"
#include "profile/cfi.h"

#include <errno.h>
#include <link.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/auxv.h>
#include <time.h>
#include <ucontext.h>

/* A frame is not longer than the usual stack of a thread. */
#define MAX_FRAME_BYTES ((uintptr_t)16 << 20)

/* Returns whether an address of the stack is readable. Makes a futex call that
 * waits while the word at the address has an unlikely value. The kernel fails
 * the call with EFAULT if the word is not readable. The timeout is zero, so the
 * call never waits. */
static bool is_readable(uintptr_t *known_page, uintptr_t address) {
    uintptr_t page = address & ~(vm_page_size() - 1);
    if (page == *known_page) {
        return true;
    }
    struct timespec none = {0, 0};
    uintptr_t word = address & ~(uintptr_t)3;
    if (os_syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 0x5a4d9b17, &none) == -EFAULT) {
        return false;
    }
    *known_page = page;
    return true;
}

/* Reads other functions' variables, which sanitizers guard. */
__attribute__((no_sanitize("address", "thread"))) static bool unwind_load(void *context, uintptr_t address,
                                                                          uintptr_t *word) {
    if (address % sizeof *word != 0 || address < 4096 || !is_readable(context, address)) {
        return false;
    }
    *word = *(const volatile uintptr_t *)address;
    return true;
}

#define MAX_MODULES 256

/* Mapped when the first one is learned. */
static struct cfi_module *modules;
static _Atomic(size_t) module_count;
static _Atomic(bool) learned;

#ifdef DLFO_STRUCT_HAS_EH_DBASE /* the headers of glibc 2.35 and later define it */
#define HAVE_FIND_OBJECT 1
/* Weak: the library also runs with older versions of glibc. */
extern __typeof__(_dl_find_object) _dl_find_object __attribute__((weak));
#endif

static bool find_module(uintptr_t address, struct cfi_module *module) {
#if defined(HAVE_FIND_OBJECT)
    if (_dl_find_object != NULL) {
        struct dl_find_object found;
        /* The C library of a static program allocates before it can find
         * objects. It can find them once constructors run. */
        bool can_find = atomic_load_explicit(&learned, memory_order_relaxed) || getauxval(AT_BASE) != 0;
        if (!can_find || _dl_find_object((void *)address, &found) != 0) {
            return false;
        }
        *module = (struct cfi_module){.start = (uintptr_t)found.dlfo_map_start,
                                      .end = (uintptr_t)found.dlfo_map_end,
                                      .tables = (uintptr_t)found.dlfo_eh_frame};
        if (module->tables - module->start >= module->end - module->start) {
            /* glibc knows only the bounds of a static program's code. */
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
            return is_readable(&(uintptr_t){0}, module->tables);
        }
    }
    return false;
}

void unwind_print_address(uintptr_t address, struct text *text) {
    text_format(text, "%p", (const void *)address);
#if defined(HAVE_FIND_OBJECT)
    struct dl_find_object found;
    if (_dl_find_object != NULL && getauxval(AT_BASE) != 0 && _dl_find_object((void *)address, &found) == 0) {
        const struct link_map *map = found.dlfo_link_map;
        bool named = map->l_name != NULL && *map->l_name != '\0';
        text_format(text, " (%s+%p)", named ? map->l_name : "program", (const void *)(address - map->l_addr));
    }
#endif
}

/* Adds a module to the table, which only grows. The address range of an
 * unloaded module holds no running code until another module is loaded
 * there. */
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
    if (modules == NULL) {
        modules = vm_map(MAX_MODULES * sizeof *modules);
    }
    if (module.tables != 0 && count < MAX_MODULES && modules != NULL) {
        modules[count] = module;
        atomic_store_explicit(&module_count, count + 1, memory_order_release);
    }
    return 0;
}

/* The loader's lock serializes the calls of learn_module. */
void unwind_learn_modules(void) {
    atomic_store_explicit(&learned, true, memory_order_relaxed);
#if defined(HAVE_FIND_OBJECT)
    if (_dl_find_object != NULL) {
        return;
    }
#endif
    dl_iterate_phdr(learn_module, NULL);
}

/* Returns this library's module, an empty one if the library is a part of the
 * program. */
static struct cfi_module own_module(void) {
    struct cfi_module own;
    if (!find_module((uintptr_t)unwind_here, &own) || getauxval(AT_ENTRY) - own.start < own.end - own.start) {
        return (struct cfi_module){0};
    }
    return own;
}

bool unwind_hides_itself(void) {
    return own_module().end != 0;
}

#if defined(__aarch64__)

/* Reads the registers of its caller, into which it is inlined, all at one
 * instruction. A call preserves these, except the link register. */
static inline __attribute__((always_inline)) void read_registers(struct cfi_registers *registers) {
    __asm__ volatile("adr x9, .\n\t"
                     "mov x10, sp\n\t"
                     "stp x19, x20, [%[registers], #8 * 19]\n\t"
                     "stp x21, x22, [%[registers], #8 * 21]\n\t"
                     "stp x23, x24, [%[registers], #8 * 23]\n\t"
                     "stp x25, x26, [%[registers], #8 * 25]\n\t"
                     "stp x27, x28, [%[registers], #8 * 27]\n\t"
                     "stp x29, x30, [%[registers], #8 * 29]\n\t"
                     "stp x10, x9, [%[registers], #8 * 31]\n\t"
                     :
                     : [registers] "r"(registers->of)
                     : "x9", "x10", "memory");
}

/* Without the bits that sign it. */
static uintptr_t plain_address(uintptr_t address) {
    return address & (((uintptr_t)1 << 48) - 1);
}

/* The kernel's handler returns to code that has no tables: mov x8,
 * #__NR_rt_sigreturn; svc #0. The stack pointer points to what the signal
 * interrupted. */
static bool step_out_of_signal(uintptr_t *known_page, struct cfi_registers *registers) {
    static const uint32_t code[] = {0xd2801168, 0xd4000001};
    const uint32_t *at = (const uint32_t *)registers->of[CFI_PC];
    if (registers->stack_is_least || registers->of[CFI_PC] < 4096 ||
        registers->of[CFI_PC] % sizeof *at != 0) {
        return false;
    }
    for (size_t i = 0; i < 2; i++) {
        if (!is_readable(known_page, (uintptr_t)&at[i]) || at[i] != code[i]) {
            return false;
        }
    }
    const struct {
        siginfo_t signal;
        ucontext_t context;
    } *frame = (const void *)registers->of[CFI_STACK];
    const mcontext_t *machine = &frame->context.uc_mcontext;
    struct cfi_registers caller = {.in_signal = true};
    for (size_t i = 0; i < 31; i++) {
        if (!unwind_load(known_page, (uintptr_t)&machine->regs[i], &caller.of[i])) {
            return false;
        }
    }
    if (!unwind_load(known_page, (uintptr_t)&machine->sp, &caller.of[CFI_STACK]) ||
        !unwind_load(known_page, (uintptr_t)&machine->pc, &caller.of[CFI_PC])) {
        return false;
    }
    *registers = caller;
    return caller.of[CFI_PC] != 0;
}

#else

static inline __attribute__((always_inline)) void read_registers(struct cfi_registers *registers) {
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
                     : [registers] "r"(registers->of), [rip] "i"(8 * CFI_PC), [rsp] "i"(8 * CFI_STACK),
                       [rbp] "i"(8 * CFI_FRAME), [rbx] "i"(8 * 3), [r12] "i"(8 * 12), [r13] "i"(8 * 13),
                       [r14] "i"(8 * 14), [r15] "i"(8 * 15)
                     : "rax", "memory");
}

static uintptr_t plain_address(uintptr_t address) {
    return address;
}

/* There are tables for it. */
static bool step_out_of_signal(const uintptr_t *known_page, const struct cfi_registers *registers) {
    (void)known_page, (void)registers;
    return false;
}

#endif

/* The frame pointer points to the caller's frame pointer and the return
 * address. On x86-64 these end the frame. */
static bool step_by_frame_pointer(uintptr_t *known_page, struct cfi_registers *registers) {
    uintptr_t frame = registers->of[CFI_FRAME];
    uintptr_t stack = registers->of[CFI_STACK];
    uintptr_t next;
    uintptr_t back;
    if (frame < stack || frame - stack > MAX_FRAME_BYTES || !unwind_load(known_page, frame, &next) ||
        !unwind_load(known_page, frame + sizeof next, &back) || back == 0) {
        return false;
    }
    registers->of[CFI_STACK] = frame + 2 * sizeof next;
    registers->of[CFI_FRAME] = next;
    registers->of[CFI_RETURN] = back;
    registers->of[CFI_PC] = back;
    registers->in_signal = false;
    registers->stack_is_least = CFI_RETURN != CFI_PC;
    return true;
}

static bool step_without_tables(uintptr_t *known_page, struct cfi_registers *registers) {
    return step_out_of_signal(known_page, registers) || step_by_frame_pointer(known_page, registers);
}

static bool step(uintptr_t *known_page, struct cfi_registers *registers) {
    struct cfi_module module;
    uintptr_t stack = registers->of[CFI_STACK];
    bool in_signal = registers->in_signal;
    if (!find_module(registers->of[CFI_PC] - !in_signal, &module) || module.tables == 0) {
        return step_without_tables(known_page, registers);
    }
    switch (cfi_step(&module, registers, unwind_load, known_page)) {
    case CFI_STEPPED:
        /* The caller's frame is at a higher address, except at a signal handler
         * with a stack of its own. */
        return registers->of[CFI_PC] != 0 &&
               (registers->in_signal || in_signal ||
                (registers->of[CFI_STACK] > stack && registers->of[CFI_STACK] - stack <= MAX_FRAME_BYTES));
    case CFI_OUTERMOST:
        return false;
    default:
        return step_without_tables(known_page, registers);
    }
}

/* Returns whether the library has tables. One without is a part of a static
 * program, and keeps no frame pointers either, except on aarch64. */
static bool can_begin(const struct cfi_registers *registers) {
    struct cfi_module module;
    return CFI_RETURN != CFI_PC || (find_module(registers->of[CFI_PC], &module) && module.tables != 0);
}

__attribute__((noinline)) size_t unwind_here(uintptr_t *addresses, size_t max) {
    uintptr_t known_page = 0;                             /* the last page that was readable */
    struct cfi_registers registers = {.in_signal = true}; /* its instruction does not follow a call */
    struct cfi_module own = own_module();
    size_t count = 0;
    read_registers(&registers);
    if (!can_begin(&registers)) {
        return 0;
    }
    while (count < max && step(&known_page, &registers)) {
        uintptr_t address = registers.of[CFI_PC] = plain_address(registers.of[CFI_PC]);
        if (count > 0 || address - own.start >= own.end - own.start) {
            /* pprof looks up the byte before an address, which is in the call.
             * An address that a signal interrupted is therefore increased by
             * one. */
            addresses[count++] = address + registers.in_signal;
        }
    }
    return count;
}
