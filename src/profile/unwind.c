#include "profile/unwind.h"

#include "os/syscall.h"
#include "os/vm.h"
#include "profile/cfi.h"

#include <errno.h>
#include <link.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/auxv.h>
#include <time.h>

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

/* The frame pointer points to the caller's frame pointer and the return
 * address. */
static bool step_by_frame_pointer(uintptr_t *known_page, struct cfi_registers *registers) {
    uintptr_t frame = registers->of[CFI_RBP];
    uintptr_t stack = registers->of[CFI_RSP];
    uintptr_t next;
    uintptr_t back;
    if (frame < stack || frame - stack > MAX_FRAME_BYTES || !unwind_load(known_page, frame, &next) ||
        !unwind_load(known_page, frame + sizeof next, &back) || back == 0) {
        return false;
    }
    registers->of[CFI_RSP] = frame + 2 * sizeof next;
    registers->of[CFI_RBP] = next;
    registers->of[CFI_RIP] = back;
    registers->in_signal = false;
    return true;
}

#if defined(__x86_64__)

/* Reads the registers of its caller, into which it is inlined, all at one
 * instruction. Returns false if the library has no tables. It is then a part of
 * a static program without tables, and keeps no frame pointers either. */
static inline __attribute__((always_inline)) bool read_registers(struct cfi_registers *registers) {
    struct cfi_module module;
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
                     : [registers] "r"(registers->of), [rip] "i"(8 * CFI_RIP), [rsp] "i"(8 * CFI_RSP),
                       [rbp] "i"(8 * CFI_RBP), [rbx] "i"(8 * 3), [r12] "i"(8 * 12), [r13] "i"(8 * 13),
                       [r14] "i"(8 * 14), [r15] "i"(8 * 15)
                     : "rax", "memory");
    registers->in_signal = true; /* rip does not follow a call */
    return find_module(registers->of[CFI_RIP], &module) && module.tables != 0;
}

static bool step(uintptr_t *known_page, struct cfi_registers *registers) {
    struct cfi_module module;
    uintptr_t stack = registers->of[CFI_RSP];
    bool in_signal = registers->in_signal;
    if (!find_module(registers->of[CFI_RIP] - !in_signal, &module) || module.tables == 0) {
        return step_by_frame_pointer(known_page, registers);
    }
    switch (cfi_step(&module, registers, unwind_load, known_page)) {
    case CFI_STEPPED:
        /* The caller's frame is at a higher address, except at a signal handler
         * with a stack of its own. */
        return registers->of[CFI_RIP] != 0 &&
               (registers->in_signal || in_signal ||
                (registers->of[CFI_RSP] > stack && registers->of[CFI_RSP] - stack <= MAX_FRAME_BYTES));
    case CFI_OUTERMOST:
        return false;
    default:
        return step_by_frame_pointer(known_page, registers);
    }
}

#else

static inline __attribute__((always_inline)) bool read_registers(struct cfi_registers *registers) {
    registers->of[CFI_RBP] = registers->of[CFI_RSP] = (uintptr_t)__builtin_frame_address(0);
    return true;
}

/* Clears the bits of pointer authentication in the return address. */
static bool step(uintptr_t *known_page, struct cfi_registers *registers) {
    bool stepped = step_by_frame_pointer(known_page, registers);
    registers->of[CFI_RIP] &= ((uintptr_t)1 << 48) - 1;
    return stepped && registers->of[CFI_RIP] != 0;
}

#endif

__attribute__((noinline)) size_t unwind_here(uintptr_t *addresses, size_t max) {
    uintptr_t known_page = 0; /* the last page that was readable */
    struct cfi_registers registers = {0};
    struct cfi_module own = own_module();
    size_t count = 0;
    if (!read_registers(&registers)) {
        return 0;
    }
    while (count < max && step(&known_page, &registers)) {
        uintptr_t address = registers.of[CFI_RIP];
        if (count > 0 || address - own.start >= own.end - own.start) {
            /* pprof looks up the byte before an address, which is in the call.
             * An address that a signal interrupted is therefore increased by
             * one. */
            addresses[count++] = address + registers.in_signal;
        }
    }
    return count;
}
