/*
 * Calls of the dynamic linker. They must not lead a library past this one to
 * libc's malloc, because blocks would then cross between two heaps. A library
 * that is opened with RTLD_DEEPBIND searches the libraries that it was linked
 * with before anything preloaded. dlsym with a library's handle searches
 * nothing else.
 *
 * Before the first such call, this library writes the addresses of its
 * functions into libc's symbol table in memory. The dynamic linker binds all
 * other symbols as usual. If the kernel refuses to change the table (mappings
 * may be sealed), RTLD_DEEPBIND is removed from the call.
 *
 * The wrappers end in a jump instead of a call, because the dynamic linker uses
 * the address to which it will return (RUNPATH, $ORIGIN, RTLD_NEXT, the
 * namespace). They allocate nothing. They leave dlerror to the next definition.
 *
 * Only in the shared library, and only for glibc, because other C libraries
 * have no RTLD_DEEPBIND.
 */
#include <features.h>

#if defined(CALM_SHARED_LIBRARY) && defined(__GLIBC__)

#include "api/limits.h"
#include "api/link_order.h"
#include "api/next.h"
#include "api/sanitizer.h"
#include "os/symbols.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

/* A library, together with those that it is linked with, is rarely larger. */
#define LIBRARY_BYTES ((size_t)256 << 20)

/* The functions that libc defines under the same names. Functions that pass a
 * call on to the next definition are missing, because that definition may
 * belong to another library, which passes the call on to libc. */
static const char redirected[][24] = {
    "malloc",          "free",          "calloc",         "realloc",
    "reallocarray",    "memalign",      "aligned_alloc",  "posix_memalign",
    "valloc",          "pvalloc",       "cfree",          "malloc_usable_size",
    "malloc_trim",     "malloc_info",   "malloc_stats",   "mallopt",
    "mallinfo",        "mallinfo2",     "free_sized",     "free_aligned_sized",
    "__libc_malloc",   "__libc_free",   "__libc_calloc",  "__libc_realloc",
    "__libc_memalign", "__libc_valloc", "__libc_pvalloc", "__libc_reallocarray",
    "prctl",           "syscall",       "vfork",          "setrlimit",
    "setrlimit64",     "prlimit",       "prlimit64",      "madvise",
    "posix_madvise",   "mprotect",      "pkey_mprotect",  "mlock",
    "mlock2",          "mlockall",      "munlockall",     "process_madvise",
};

enum { NAMES = sizeof redirected / sizeof redirected[0] };

static void *not_there(void) {
    return NULL;
}

static any_function loader_next(_Atomic(any_function) *known, const char *name) {
    any_function next = next_of(known, name);
    return next == NULL ? (any_function)not_there : next;
}

/* ---- libc's symbols ---- */

struct table {
    ElfW(Addr) base;
    ElfW(Sym) * symbols[NAMES]; /* NULL if libc has none, or if it already leads to the right function */
    ElfW(Addr) values[NAMES];
    uintptr_t start, end; /* of the pages that hold the symbols */
};

/*
 * Finds the symbols of libc to change, and the values that lead to this
 * library's own functions. These functions pass no call on.
 *
 * Another library that comes before this one may define some of the functions,
 * too. Symbols must not lead there, because those functions may pass calls on
 * to what they find in libc, which would be themselves. If such a library
 * defines malloc, the process does not use this library's malloc, and no symbol
 * is changed.
 */
static void find_symbols(struct table *table, const ElfW(Dyn) * dynamic) {
    const struct link_map *first;
    const struct link_map *own = link_order_has_own_malloc() ? link_order_object(_DYNAMIC, &first) : NULL;
    table->start = UINTPTR_MAX;
    for (size_t i = 0; i < NAMES && own != NULL; i++) {
        const ElfW(Sym) *symbol = symbols_look_up(table->base, dynamic, redirected[i]);
        const ElfW(Sym) *ours = symbols_look_up(own->l_addr, own->l_ld, redirected[i]);
        if (symbol == NULL || ours == NULL) {
            continue;
        }
        table->values[i] = own->l_addr + ours->st_value - table->base;
        if (table->values[i] != symbol->st_value) {
            uintptr_t at = (uintptr_t)symbol;
            table->symbols[i] = (ElfW(Sym) *)at;
            table->start = at < table->start ? at & ~((uintptr_t)vm_page_size() - 1) : table->start;
            table->end = at + sizeof *symbol > table->end ? at + sizeof *symbol : table->end;
        }
    }
}

static const ElfW(Phdr) * part_of(const struct dl_phdr_info *object, uintptr_t address) {
    for (size_t i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && address - object->dlpi_addr - part->p_vaddr < part->p_memsz) {
            return part;
        }
    }
    return NULL;
}

static bool protect(const struct table *table, int access) {
    size_t bytes = vm_round_up(table->end - table->start);
    return os_syscall(SYS_mprotect, table->start, bytes, access) == 0;
}

/* Other threads may look symbols up meanwhile. Each finds the old or the new
 * value. */
static bool redirect_symbols(const struct dl_phdr_info *libc, const ElfW(Dyn) * dynamic) {
    struct table table = {.base = libc->dlpi_addr};
    find_symbols(&table, dynamic);
    const ElfW(Phdr) *part = part_of(libc, table.start);
    if (table.end == 0) {
        return true;
    }
    int access = part == NULL || (part->p_flags & PF_X) == 0 ? PROT_READ : PROT_READ | PROT_EXEC;
    if (!protect(&table, access | PROT_WRITE)) {
        return false;
    }
    for (size_t i = 0; i < NAMES; i++) {
        if (table.symbols[i] != NULL) {
            __atomic_store_n(&table.symbols[i]->st_value, table.values[i], __ATOMIC_RELAXED);
        }
    }
    protect(&table, access);
    return true;
}

static _Atomic(bool) is_redirected;

/* Called by dl_iterate_phdr, whose lock keeps other threads out. */
static int redirect_libc(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *slash = strrchr(object->dlpi_name, '/');
    if (slash == NULL || strncmp(slash, "/libc.so.", strlen("/libc.so.")) != 0) {
        return 0;
    }
    for (size_t i = 0; i < object->dlpi_phnum && !is_redirected; i++) {
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            is_redirected =
                redirect_symbols(object, (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr));
        }
    }
    return 1;
}

/* Makes libc's symbols lead to this library's functions, and returns whether
 * they do. If a sanitizer brings an allocator, changes nothing and returns
 * true. */
static bool redirect(void) {
    if (!is_redirected && !sanitizer_is_there()) {
        dl_iterate_phdr(redirect_libc, NULL);
    }
    return is_redirected || sanitizer_is_there();
}

/* ---- before_NAME may change the arguments, and returns the next NAME ---- */

#define BEFORE __attribute__((used, visibility("hidden"))) any_function

static void before_open(uintptr_t *flags) {
    if ((*flags & RTLD_DEEPBIND) != 0 && !redirect()) {
        *flags &= ~(uintptr_t)RTLD_DEEPBIND;
    }
    limits_make_room(LIBRARY_BYTES);
}

static void before_lookup(void *library, const char *name) {
    if (library == RTLD_DEFAULT || is_redirected) {
        return;
    }
    for (size_t i = 0; i < NAMES; i++) {
        if (symbols_same_name(name, redirected[i])) {
            redirect();
            return;
        }
    }
}

static _Atomic(any_function) next_dlopen, next_dlmopen, next_dlsym, next_dlvsym;

BEFORE before_dlopen(uintptr_t *arguments) {
    before_open(&arguments[1]);
    return loader_next(&next_dlopen, "dlopen");
}

BEFORE before_dlmopen(uintptr_t *arguments) {
    before_open(&arguments[2]);
    return loader_next(&next_dlmopen, "dlmopen");
}

BEFORE before_dlsym(uintptr_t *arguments) {
    before_lookup((void *)arguments[0], (const char *)arguments[1]);
    return loader_next(&next_dlsym, "dlsym");
}

BEFORE before_dlvsym(uintptr_t *arguments) {
    before_lookup((void *)arguments[0], (const char *)arguments[1]);
    return loader_next(&next_dlvsym, "dlvsym");
}

/* Saves three arguments on the stack, where before_NAME may change them. */
#define JUMP(name)                                                                     \
    __asm__(".pushsection .text\n\t"                                                   \
            ".globl " #name "\n\t"                                                     \
            ".type " #name ", %function\n\t"                                           \
            ".balign 16\n" #name ":\n\t"                                               \
            ".cfi_startproc\n\t" INSTRUCTIONS(name) ".cfi_endproc\n\t"                 \
                                                    ".size " #name ", .-" #name "\n\t" \
                                                    ".popsection")

#if defined(__x86_64__)
#define INSTRUCTIONS(name)          \
    "pushq %rdx\n\t"                \
    ".cfi_adjust_cfa_offset 8\n\t"  \
    "pushq %rsi\n\t"                \
    ".cfi_adjust_cfa_offset 8\n\t"  \
    "pushq %rdi\n\t"                \
    ".cfi_adjust_cfa_offset 8\n\t"  \
    "movq %rsp, %rdi\n\t"           \
    "call before_" #name "\n\t"     \
    "popq %rdi\n\t"                 \
    ".cfi_adjust_cfa_offset -8\n\t" \
    "popq %rsi\n\t"                 \
    ".cfi_adjust_cfa_offset -8\n\t" \
    "popq %rdx\n\t"                 \
    ".cfi_adjust_cfa_offset -8\n\t" \
    "jmp *%rax\n\t"
#elif defined(__aarch64__)
/* hint 34 is "bti c" */
#define INSTRUCTIONS(name)           \
    "hint #34\n\t"                   \
    "stp x0, x1, [sp, #-32]!\n\t"    \
    ".cfi_adjust_cfa_offset 32\n\t"  \
    "stp x2, x30, [sp, #16]\n\t"     \
    ".cfi_rel_offset 30, 24\n\t"     \
    "mov x0, sp\n\t"                 \
    "bl before_" #name "\n\t"        \
    "mov x16, x0\n\t"                \
    "ldp x2, x30, [sp, #16]\n\t"     \
    ".cfi_restore 30\n\t"            \
    "ldp x0, x1, [sp], #32\n\t"      \
    ".cfi_adjust_cfa_offset -32\n\t" \
    "br x16\n\t"
#endif

JUMP(dlopen);
JUMP(dlmopen);
JUMP(dlsym);
JUMP(dlvsym);

#endif
