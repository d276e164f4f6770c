/*
 * Preloaded before any allocator: passes each call on to it, and tells of large blocks, and of mappings that
 * the program makes itself, where they are and which calls led there (table.h).
 *
 * Within dlsym, and within the walk up the stack, a thread's own calls are passed on untold: nothing here can
 * go round in a circle. What dlsym allocates before malloc is known comes from a small room of our own.
 */
#include "table.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OWN_FRAMES = 8, ROOM = 1 << 16, ALIGNMENT = 16 };

/* Called by these: the headers say that the functions never call back into this file, but they do, by malloc.
 */
static void *(*volatile find_symbol)(void *handle, const char *name) = dlsym;
static int (*volatile find_callers)(void **frames, int size) = backtrace;

static __thread bool inside __attribute__((tls_model("initial-exec")));

/* Within dlsym: malloc may be unknown, or not ready to be called before its own library has begun. */
static __thread bool resolving __attribute__((tls_model("initial-exec")));

/* The real ones, by what they take. */
typedef void *sized(size_t size);
typedef void *sized_twice(size_t one, size_t two);

static struct {
    sized *malloc, *valloc, *pvalloc;
    sized_twice *calloc, *aligned_alloc, *memalign;
    void *(*realloc)(void *block, size_t size);
    void *(*reallocarray)(void *block, size_t count, size_t size);
    int (*posix_memalign)(void **block, size_t alignment, size_t size);
    void (*free)(void *block);
    void (*free_sized)(void *block, size_t size);
    void (*free_aligned_sized)(void *block, size_t alignment, size_t size);
    void *(*mmap)(void *address, size_t bytes, int rights, int flags, int descriptor, off_t offset);
    int (*munmap)(void *address, size_t bytes);
    void *(*mremap)(void *address, size_t had, size_t bytes, int flags, ...);
} real;

static atomic_bool resolved;

static _Alignas(ALIGNMENT) char room[ROOM];
static _Atomic size_t room_used;

/* The program or library that malloc is in, and this library. */
struct range {
    uintptr_t low;
    uintptr_t high;
};

static struct range allocator;
static struct range own;

static bool within(const struct range *range, const void *address) {
    return (uintptr_t)address >= range->low && (uintptr_t)address < range->high;
}

/* What does not fit takes nothing from those that do. Each has a byte at least, so that none lies behind. */
static void *from_room(size_t alignment, size_t size) {
    size_t used = atomic_load_explicit(&room_used, memory_order_relaxed);
    size_t start;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        errno = EINVAL;
        return NULL;
    }
    alignment = alignment > ALIGNMENT ? alignment : ALIGNMENT;
    size = size > 0 ? size : 1;
    do {
        uintptr_t next = ((uintptr_t)room + used + alignment - 1) & ~(uintptr_t)(alignment - 1);
        start = next - (uintptr_t)room;
        if (start > ROOM || size > ROOM - start) {
            errno = ENOMEM;
            return NULL;
        }
    } while (!atomic_compare_exchange_weak(&room_used, &used, start + size));
    return room + start;
}

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

static bool is_in_room(const void *block) {
    return (uintptr_t)block >= (uintptr_t)room && (uintptr_t)block < (uintptr_t)room + ROOM;
}

/* A function's address out of an object's, which C has no conversion for. */
static void look_up(const char *name, void *function) {
    void *found = find_symbol(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

static void resolve(void) {
    if (atomic_load_explicit(&resolved, memory_order_acquire) || resolving) {
        return;
    }
    resolving = true;
    look_up("malloc", &real.malloc);
    look_up("free", &real.free);
    look_up("calloc", &real.calloc);
    look_up("realloc", &real.realloc);
    look_up("memalign", &real.memalign);
    look_up("aligned_alloc", &real.aligned_alloc);
    look_up("posix_memalign", &real.posix_memalign);
    look_up("valloc", &real.valloc);
    look_up("pvalloc", &real.pvalloc);
    look_up("reallocarray", &real.reallocarray);
    look_up("free_sized", &real.free_sized);
    look_up("free_aligned_sized", &real.free_aligned_sized);
    look_up("mmap", &real.mmap);
    look_up("munmap", &real.munmap);
    look_up("mremap", &real.mremap);
    resolving = false;
    atomic_store_explicit(&resolved, true, memory_order_release);
}

/* The calls that led here, without this library's own and what is between them and the walk. */
__attribute__((noinline)) static void walk(struct stack *stack) {
    void *frames[FRAMES + OWN_FRAMES];
    int count = find_callers(frames, FRAMES + OWN_FRAMES);
    int first = 0;
    for (int at = 0; at < count && at < OWN_FRAMES; at++) {
        if (within(&own, frames[at])) {
            first = at + 1;
        }
    }
    stack->depth = 0;
    for (int at = first; at < count && stack->depth < FRAMES; at++) {
        stack->frames[stack->depth++] = (uint64_t)(uintptr_t)frames[at];
    }
}

static void tell(enum kind kind, const void *address, size_t bytes) {
    if (address == NULL || inside || !table_wants(bytes)) {
        return;
    }
    int kept = errno;
    inside = true;
    struct stack stack;
    walk(&stack);
    table_add(kind, address, bytes, &stack);
    inside = false;
    errno = kept;
}

static void *told(void *block, size_t size) {
    tell(KIND_BLOCK, block, size);
    return block;
}

/* Before a block goes: afterwards another thread may have its address. */
static bool forget(const void *block, struct record *gone) {
    if (block == NULL || inside || !table_may_have(block)) {
        return false;
    }
    inside = true;
    bool found = table_remove(block, gone);
    inside = false;
    return found;
}

EXPORT void *malloc(size_t size) {
    if (resolving) {
        return from_room(ALIGNMENT, size);
    }
    resolve();
    return told(real.malloc(size), size);
}

EXPORT void free(void *block) {
    /* What dlsym frees is from the room. */
    if (block == NULL || resolving || is_in_room(block)) {
        return;
    }
    struct record gone;
    (void)forget(block, &gone);
    resolve();
    real.free(block);
}

EXPORT void *calloc(size_t count, size_t size) {
    size_t bytes;
    bool too_much = __builtin_mul_overflow(count, size, &bytes);
    if (resolving) {
        /* Its memory was never used. */
        return from_room(ALIGNMENT, too_much ? SIZE_MAX : bytes);
    }
    resolve();
    return told(real.calloc(count, size), too_much ? 0 : bytes);
}

/* What a block of the room holds at most. */
static size_t room_bytes(const void *block) {
    return (size_t)(room + ROOM - (const char *)block);
}

EXPORT void *realloc(void *block, size_t size) {
    if (is_in_room(block)) {
        void *moved = malloc(size);
        if (moved != NULL) {
            memcpy(moved, block, size < room_bytes(block) ? size : room_bytes(block));
        }
        return moved;
    }
    if (resolving) {
        return from_room(ALIGNMENT, size);
    }
    resolve();
    struct record gone;
    bool was_told = forget(block, &gone);
    void *moved = real.realloc(block, size);
    if (moved == NULL && size != 0 && was_told) {
        table_restore(&gone);
    }
    return told(moved, size);
}

EXPORT void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, bytes);
}

EXPORT void *memalign(size_t alignment, size_t size) {
    if (resolving) {
        return from_room(alignment, size);
    }
    resolve();
    return told(real.memalign(alignment, size), size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size) {
    if (resolving) {
        return from_room(alignment, size);
    }
    resolve();
    return told(real.aligned_alloc(alignment, size), size);
}

EXPORT int posix_memalign(void **block, size_t alignment, size_t size) {
    if (resolving) {
        int kept = errno;
        void *found = from_room(alignment % sizeof(void *) == 0 ? alignment : 0, size);
        int reason = found != NULL ? 0 : errno;
        errno = kept;
        if (found != NULL) {
            *block = found;
        }
        return reason;
    }
    resolve();
    int error = real.posix_memalign(block, alignment, size);
    if (error == 0) {
        tell(KIND_BLOCK, *block, size);
    }
    return error;
}

EXPORT void *valloc(size_t size) {
    if (resolving) {
        return from_room(page_bytes(), size);
    }
    resolve();
    return told(real.valloc(size), size);
}

EXPORT void *pvalloc(size_t size) {
    if (resolving) {
        size_t last = page_bytes() - 1;
        return from_room(page_bytes(), size <= ROOM ? (size + last) & ~last : size);
    }
    resolve();
    return told(real.pvalloc(size), size);
}

/* Of C23; before, nobody has them but us, who are as good as free. */
EXPORT void free_sized(void *block, size_t size);
EXPORT void free_sized(void *block, size_t size) {
    struct record gone;
    if (real.free_sized == NULL) {
        free(block);
        return;
    }
    (void)forget(block, &gone);
    real.free_sized(block, size);
}

EXPORT void free_aligned_sized(void *block, size_t alignment, size_t size);
EXPORT void free_aligned_sized(void *block, size_t alignment, size_t size) {
    struct record gone;
    if (real.free_aligned_sized == NULL) {
        free(block);
        return;
    }
    (void)forget(block, &gone);
    real.free_aligned_sized(block, alignment, size);
}

/*
 * C++'s operators. The C++ library's call malloc, which tells; an allocator's own do not, so it is told here.
 * Where the library was loaded later, by one that keeps it to itself, there is nothing behind us: malloc does
 * it.
 */
extern void cxx_throw_bad_alloc(void) __asm__("_ZSt17__throw_bad_allocv") __attribute__((weak));

static void *created(void *function, void *block, size_t size) {
    return within(&allocator, function) ? told(block, size) : block;
}

static void *created_by_malloc(size_t size, size_t alignment, bool throws) {
    void *block = alignment <= ALIGNMENT ? malloc(size) : memalign(alignment, size);
    if (block == NULL && throws) {
        if (cxx_throw_bad_alloc != NULL) {
            cxx_throw_bad_alloc();
        }
        abort();
    }
    return block;
}

static void *behind(void *_Atomic *kept, const char *name) {
    void *found = atomic_load_explicit(kept, memory_order_relaxed);
    if (found == NULL) {
        resolving = true;
        found = find_symbol(RTLD_NEXT, name);
        resolving = false;
        /* There is nothing behind us: not asked again. */
        atomic_store_explicit(kept, found != NULL ? found : room, memory_order_relaxed);
    }
    return found != (void *)room ? found : NULL;
}

/* size_t, std::align_val_t, const std::nothrow_t& and pointers are all passed as integers are. */
#define NEW(name, mangled, alignment, throws)                                     \
    EXPORT void *name(size_t size, size_t second, size_t third) __asm__(mangled); \
    EXPORT void *name(size_t size, size_t second, size_t third) {                 \
        static void *_Atomic kept;                                                \
        void *(*next)(size_t, size_t, size_t);                                    \
        void *found = behind(&kept, mangled);                                     \
        memcpy(&next, &found, sizeof next);                                       \
        if (found == NULL) {                                                      \
            return created_by_malloc(size, alignment, throws);                    \
        }                                                                         \
        return created(found, next(size, second, third), size);                   \
    }
#define DELETE(name, mangled)                                                    \
    EXPORT void name(void *block, size_t second, size_t third) __asm__(mangled); \
    EXPORT void name(void *block, size_t second, size_t third) {                 \
        static void *_Atomic kept;                                               \
        void (*next)(void *, size_t, size_t);                                    \
        void *found = behind(&kept, mangled);                                    \
        memcpy(&next, &found, sizeof next);                                      \
        struct record gone;                                                      \
        if (found == NULL) {                                                     \
            free(block);                                                         \
            return;                                                              \
        }                                                                        \
        (void)forget(block, &gone);                                              \
        next(block, second, third);                                              \
    }

NEW(new_plain, "_Znwm", 1, true)
NEW(new_array, "_Znam", 1, true)
NEW(new_nothrow, "_ZnwmRKSt9nothrow_t", 1, false)
NEW(new_array_nothrow, "_ZnamRKSt9nothrow_t", 1, false)
NEW(new_aligned, "_ZnwmSt11align_val_t", second, true)
NEW(new_array_aligned, "_ZnamSt11align_val_t", second, true)
NEW(new_aligned_nothrow, "_ZnwmSt11align_val_tRKSt9nothrow_t", second, false)
NEW(new_array_aligned_nothrow, "_ZnamSt11align_val_tRKSt9nothrow_t", second, false)

DELETE(delete_plain, "_ZdlPv")
DELETE(delete_array, "_ZdaPv")
DELETE(delete_sized, "_ZdlPvm")
DELETE(delete_array_sized, "_ZdaPvm")
DELETE(delete_nothrow, "_ZdlPvRKSt9nothrow_t")
DELETE(delete_array_nothrow, "_ZdaPvRKSt9nothrow_t")
DELETE(delete_aligned, "_ZdlPvSt11align_val_t")
DELETE(delete_array_aligned, "_ZdaPvSt11align_val_t")
DELETE(delete_sized_aligned, "_ZdlPvmSt11align_val_t")
DELETE(delete_array_sized_aligned, "_ZdaPvmSt11align_val_t")
DELETE(delete_aligned_nothrow, "_ZdlPvSt11align_val_tRKSt9nothrow_t")
DELETE(delete_array_aligned_nothrow, "_ZdaPvSt11align_val_tRKSt9nothrow_t")

/* The program's own mappings, not those that the allocator makes its blocks of. */
static bool is_to_tell(const void *caller, int rights) {
    return (rights & PROT_WRITE) != 0 && !within(&allocator, caller);
}

EXPORT void *mmap(void *address, size_t bytes, int rights, int flags, int descriptor, off_t offset) {
    resolve();
    if (real.mmap == NULL) {
        return (void *)syscall(SYS_mmap, address, bytes, rights, flags, descriptor, offset);
    }
    bool replaces = (flags & MAP_FIXED) != 0 && !inside;
    uint64_t before = replaces ? table_before_cut(address, bytes) : 0;
    void *mapped = real.mmap(address, bytes, rights, flags, descriptor, offset);
    if (replaces && mapped != MAP_FAILED) {
        table_cut(address, bytes, before);
    }
    if (mapped != MAP_FAILED && is_to_tell(__builtin_return_address(0), rights)) {
        tell(KIND_MAPPING, mapped, bytes);
    }
    return mapped;
}

/* On 64-bit machines the same. */
EXPORT void *mmap64(void *address, size_t bytes, int rights, int flags, int descriptor, off_t offset)
    __attribute__((alias("mmap")));

EXPORT int munmap(void *address, size_t bytes) {
    resolve();
    if (real.munmap == NULL) {
        return (int)syscall(SYS_munmap, address, bytes);
    }
    uint64_t before = inside ? 0 : table_before_cut(address, bytes);
    int error = real.munmap(address, bytes);
    if (error == 0 && !inside) {
        table_cut(address, bytes, before);
    }
    return error;
}

/* Declared with a list of arguments that varies; the fifth is passed as if it did not, and read if it was. */
EXPORT void *remap(void *address, size_t had, size_t bytes, int flags, void *fifth) __asm__("mremap");
EXPORT void *remap(void *address, size_t had, size_t bytes, int flags, void *fifth) {
    void *wanted = (flags & MREMAP_FIXED) != 0 ? fifth : NULL;
    resolve();
    if (real.mremap == NULL) {
        return (void *)syscall(SYS_mremap, address, had, bytes, flags, wanted);
    }
    struct record gone;
    bool was_told = forget(address, &gone);
    bool replaces = wanted != NULL && !inside;
    uint64_t before = replaces ? table_before_cut(wanted, bytes) : 0;
    void *mapped = real.mremap(address, had, bytes, flags, wanted);
    if (replaces && mapped != MAP_FAILED) {
        table_cut(wanted, bytes, before);
    }
    if (was_told && mapped == MAP_FAILED) {
        table_restore(&gone);
    } else if (was_told) {
        tell(KIND_MAPPING, mapped, bytes);
    }
    return mapped;
}

/* Past all destructors; those of a child that was forked, most often. */
EXPORT _Noreturn void _exit(int status) {
    table_show(MOMENT_EXIT);
    for (;;) {
        (void)syscall(SYS_exit_group, status);
    }
}

EXPORT _Noreturn void _Exit(int status) __attribute__((alias("_exit")));

struct sought {
    uintptr_t address;
    struct range *found;
};

static int note_range(struct dl_phdr_info *object, size_t unused, void *wanted) {
    (void)unused;
    const struct sought *sought = wanted;
    struct range range = {UINTPTR_MAX, 0};
    for (int at = 0; at < object->dlpi_phnum; at++) {
        if (object->dlpi_phdr[at].p_type == PT_LOAD) {
            uintptr_t low = object->dlpi_addr + object->dlpi_phdr[at].p_vaddr;
            uintptr_t high = low + object->dlpi_phdr[at].p_memsz;
            range.low = low < range.low ? low : range.low;
            range.high = high > range.high ? high : range.high;
        }
    }
    if (sought->address < range.low || sought->address >= range.high) {
        return 0;
    }
    *sought->found = range;
    return 1;
}

static void parent_goes_on(void) {
    table_after_fork(false);
}

static void child_begins(void) {
    table_after_fork(true);
}

__attribute__((constructor)) static void begin(void) {
    resolve();
    const char *folder = getenv(RECORDS_FOLDER);
    const char *least = getenv(RECORDS_LEAST);
    if (folder == NULL || least == NULL) {
        return;
    }
    struct sought of_malloc = {0, &allocator};
    memcpy(&of_malloc.address, &real.malloc, sizeof of_malloc.address);
    struct sought of_room = {(uintptr_t)room, &own};
    (void)dl_iterate_phdr(note_range, &of_malloc);
    (void)dl_iterate_phdr(note_range, &of_room);
    if (pthread_atfork(table_before_fork, parent_goes_on, child_begins) == 0) {
        table_open(folder, strtoull(least, NULL, 10), own.low, own.high);
    }
}

__attribute__((destructor)) static void end(void) {
    table_show(MOMENT_EXIT);
}
