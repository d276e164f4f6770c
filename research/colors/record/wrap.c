/*
 * Preloaded before any allocator: passes each call on to it, and records large blocks, and mappings that the
 * program makes itself, with the calls that led there (table.h).
 *
 * Calls that a thread makes within dlsym, or within the stack walk, are passed on without a record, so
 * nothing here recurses. Memory that dlsym allocates before malloc is known comes from a small static room.
 */
#include "table.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OWN_FRAMES = 8, ROOM = 1 << 16, ALIGNMENT = 16 };

/* Called by pointers: by their declarations they never call back into this file, but they do, by malloc. */
static void *(*volatile find_symbol)(void *handle, const char *name) = dlsym;
static int (*volatile find_callers)(void **frames, int size) = backtrace;

static __thread bool inside __attribute__((tls_model("initial-exec")));

/* Within dlsym: malloc may be unknown, or not callable before the constructors of its library. */
static __thread bool resolving __attribute__((tls_model("initial-exec")));

/* The functions that calls are passed on to. */
/* clang-format off */
#define FUNCTIONS(X) \
    X(malloc) X(free) X(calloc) X(realloc) X(memalign) X(aligned_alloc) X(posix_memalign) X(valloc) \
    X(pvalloc) X(mmap) X(munmap) X(mremap)
/* clang-format on */
#define DECLARE(name) __typeof__(name) *name; /* NOLINT(bugprone-macro-parentheses) */
#define LOOK_UP(name) look_up(#name, &real.name);
static struct { FUNCTIONS(DECLARE) } real;

static atomic_bool resolved;

static _Alignas(ALIGNMENT) char room[ROOM];
static _Atomic size_t room_used;

/* The object that has malloc, and this library. */
struct range {
    uintptr_t low;
    uintptr_t high;
};

static struct range allocator;
static struct range own;

static bool within(const struct range *range, const void *address) {
    return (uintptr_t)address >= range->low && (uintptr_t)address < range->high;
}

/* A request that does not fit takes nothing. Each gets a byte at least, so that none is at the room's end. */
static void *from_room(size_t size) {
    size_t used = atomic_load(&room_used);
    size = size > 0 ? size : 1;
    do {
        if (size > ROOM - used) {
            errno = ENOMEM;
            return NULL;
        }
    } while (!atomic_compare_exchange_weak(&room_used, &used,
                                           used + (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT));
    return room + used;
}

static bool is_in_room(const void *block) {
    return (uintptr_t)block >= (uintptr_t)room && (uintptr_t)block < (uintptr_t)room + ROOM;
}

/* C has no conversion from an object's address to a function's. */
static void look_up(const char *name, void *function) {
    void *found = find_symbol(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

static void resolve(void) {
    if (atomic_load_explicit(&resolved, memory_order_acquire) || resolving) {
        return;
    }
    resolving = true;
    FUNCTIONS(LOOK_UP)
    resolving = false;
    atomic_store_explicit(&resolved, true, memory_order_release);
}

/* The calls that led here, without those of this library, and the walk's own. */
__attribute__((noinline)) static void walk(struct record *block) {
    void *frames[FRAMES + OWN_FRAMES];
    int count = find_callers(frames, FRAMES + OWN_FRAMES);
    int first = 0;
    for (int at = 0; at < count && at < OWN_FRAMES; at++) {
        if (within(&own, frames[at])) {
            first = at + 1;
        }
    }
    block->depth = 0;
    for (int at = first; at < count && block->depth < FRAMES; at++) {
        block->frames[block->depth++] = (uint64_t)(uintptr_t)frames[at];
    }
}

static void record(enum kind kind, const void *address, size_t bytes) {
    if (address == NULL || inside || !table_wants(bytes)) {
        return;
    }
    int kept = errno;
    inside = true;
    struct record block = {.kind = (uint16_t)kind, .address = (uint64_t)(uintptr_t)address, .bytes = bytes};
    walk(&block);
    table_add(&block);
    inside = false;
    errno = kept;
}

static void *recorded(void *block, size_t size) {
    record(KIND_BLOCK, block, size);
    return block;
}

/* Before a block is freed: afterwards another thread may have its address. */
static bool unrecord(const void *block, struct record *gone) {
    if (block == NULL || inside || !table_may_have(block)) {
        return false;
    }
    inside = true;
    bool found = table_remove(block, gone);
    inside = false;
    return found;
}

#define PASS_ON(call, size) (resolve(), recorded(real.call, size))

/* dlsym calls malloc, calloc, realloc and free, and none of the others. */
EXPORT void *malloc(size_t size) {
    return resolving ? from_room(size) : PASS_ON(malloc(size), size);
}

EXPORT void *memalign(size_t alignment, size_t size) {
    return PASS_ON(memalign(alignment, size), size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size) {
    return PASS_ON(aligned_alloc(alignment, size), size);
}

EXPORT void *valloc(size_t size) {
    return PASS_ON(valloc(size), size);
}

EXPORT void *pvalloc(size_t size) {
    return PASS_ON(pvalloc(size), size);
}

EXPORT void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        bytes = SIZE_MAX;
    }
    /* The memory of the room was never used. */
    return resolving ? from_room(bytes) : PASS_ON(calloc(count, size), bytes);
}

EXPORT void free(void *block) {
    /* dlsym frees blocks of the room. */
    if (block == NULL || resolving || is_in_room(block)) {
        return;
    }
    struct record gone;
    (void)unrecord(block, &gone);
    resolve();
    real.free(block);
}

EXPORT void *realloc(void *block, size_t size) {
    if (is_in_room(block)) {
        void *moved = malloc(size);
        size_t had = (size_t)(room + ROOM - (const char *)block); /* at most */
        if (moved != NULL) {
            memcpy(moved, block, size < had ? size : had);
        }
        return moved;
    }
    if (resolving) {
        return from_room(size);
    }
    resolve();
    struct record gone;
    bool was_recorded = unrecord(block, &gone);
    void *moved = real.realloc(block, size);
    if (moved == NULL && size != 0 && was_recorded) {
        table_restore(&gone);
    }
    return recorded(moved, size);
}

EXPORT void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, bytes);
}

EXPORT int posix_memalign(void **block, size_t alignment, size_t size) {
    resolve();
    int error = real.posix_memalign(block, alignment, size);
    if (error == 0) {
        record(KIND_BLOCK, *block, size);
    }
    return error;
}

/* C23. An allocator's own may check the size, but need not. */
EXPORT void free_sized(void *block, size_t size) {
    (void)size;
    free(block);
}

EXPORT void free_aligned_sized(void *block, size_t alignment, size_t size) {
    (void)alignment;
    free_sized(block, size);
}

/*
 * C++'s operators. Those of the C++ library call malloc, which records the block; those of an allocator do
 * not, so the block is recorded here. If there are no operators behind ours, as the C++ library was loaded
 * later with RTLD_LOCAL, malloc takes their place.
 */
extern void cxx_throw_bad_alloc(void) __asm__("_ZSt17__throw_bad_allocv") __attribute__((weak));

static void *behind(void *_Atomic *kept, const char *name) {
    void *found = atomic_load_explicit(kept, memory_order_relaxed);
    if (found == NULL) {
        resolving = true;
        found = find_symbol(RTLD_NEXT, name);
        resolving = false;
        /* The room stands for none, so that each is looked up once. */
        atomic_store_explicit(kept, found != NULL ? found : room, memory_order_relaxed);
    }
    return found != (void *)room ? found : NULL;
}

static void *created(void *function, size_t size, size_t second, size_t third, size_t alignment,
                     bool throws) {
    if (function != NULL) {
        void *(*next)(size_t, size_t, size_t);
        memcpy(&next, &function, sizeof next);
        void *block = next(size, second, third);
        return within(&allocator, function) ? recorded(block, size) : block;
    }
    void *block = alignment <= ALIGNMENT ? malloc(size) : memalign(alignment, size);
    if (block == NULL && throws) {
        if (cxx_throw_bad_alloc != NULL) {
            cxx_throw_bad_alloc();
        }
        abort();
    }
    return block;
}

static void destroyed(void *function, void *block, size_t second, size_t third) {
    if (function == NULL) {
        free(block);
        return;
    }
    struct record gone;
    (void)unrecord(block, &gone);
    void (*next)(void *, size_t, size_t);
    memcpy(&next, &function, sizeof next);
    next(block, second, third);
}

/* size_t, std::align_val_t, const std::nothrow_t& and pointers are all passed as integers. */
#define NEW(name, mangled, alignment, throws)                                           \
    EXPORT void *name(size_t size, size_t second, size_t third) __asm__(mangled);       \
    EXPORT void *name(size_t size, size_t second, size_t third) {                       \
        static void *_Atomic next;                                                      \
        return created(behind(&next, mangled), size, second, third, alignment, throws); \
    }
#define DELETE(name, mangled)                                                    \
    EXPORT void name(void *block, size_t second, size_t third) __asm__(mangled); \
    EXPORT void name(void *block, size_t second, size_t third) {                 \
        static void *_Atomic next;                                               \
        destroyed(behind(&next, mangled), block, second, third);                 \
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

EXPORT void *mmap(void *address, size_t bytes, int rights, int flags, int descriptor, off_t offset) {
    resolve();
    uint64_t before = (flags & MAP_FIXED) != 0 && !inside ? table_before_cut(address, bytes) : 0;
    void *mapped = real.mmap(address, bytes, rights, flags, descriptor, offset);
    if (mapped != MAP_FAILED) {
        table_cut(address, bytes, before);
        /* Mappings that the allocator divides into blocks are not the program's. */
        if ((rights & PROT_WRITE) != 0 && !within(&allocator, __builtin_return_address(0))) {
            record(KIND_MAPPING, mapped, bytes);
        }
    }
    return mapped;
}

/* The same on 64-bit machines. */
EXPORT void *mmap64(void *address, size_t bytes, int rights, int flags, int descriptor, off_t offset)
    __attribute__((alias("mmap")));

EXPORT int munmap(void *address, size_t bytes) {
    resolve();
    uint64_t before = inside ? 0 : table_before_cut(address, bytes);
    int error = real.munmap(address, bytes);
    if (error == 0) {
        table_cut(address, bytes, before);
    }
    return error;
}

/* Declared as variadic; the fifth argument is passed as a fixed one is, and used only if it was passed. */
EXPORT void *remap(void *address, size_t had, size_t bytes, int flags, void *fifth) __asm__("mremap");
EXPORT void *remap(void *address, size_t had, size_t bytes, int flags, void *fifth) {
    void *wanted = (flags & MREMAP_FIXED) != 0 ? fifth : NULL;
    resolve();
    struct record gone;
    bool was_recorded = unrecord(address, &gone);
    uint64_t before = wanted != NULL && !inside ? table_before_cut(wanted, bytes) : 0;
    void *mapped = real.mremap(address, had, bytes, flags, wanted);
    if (mapped != MAP_FAILED) {
        table_cut(wanted, bytes, before);
    }
    if (was_recorded && mapped == MAP_FAILED) {
        table_restore(&gone);
    } else if (was_recorded) {
        record(KIND_MAPPING, mapped, bytes);
    }
    return mapped;
}

/* Ends a process without destructors, as children of fork do. */
EXPORT _Noreturn void _exit(int status) {
    table_show(MOMENT_EXIT);
    for (;;) {
        (void)syscall(SYS_exit_group, status);
    }
}

EXPORT _Noreturn void _Exit(int status) __attribute__((alias("_exit")));

/* Finds the object that has `low` of the wanted range, and replaces the range by the object's. */
static int note_range(struct dl_phdr_info *object, size_t unused, void *data) {
    (void)unused;
    struct range *wanted = data;
    struct range range = {UINTPTR_MAX, 0};
    for (int at = 0; at < object->dlpi_phnum; at++) {
        if (object->dlpi_phdr[at].p_type == PT_LOAD) {
            uintptr_t low = object->dlpi_addr + object->dlpi_phdr[at].p_vaddr;
            uintptr_t high = low + object->dlpi_phdr[at].p_memsz;
            range.low = low < range.low ? low : range.low;
            range.high = high > range.high ? high : range.high;
        }
    }
    if (wanted->low < range.low || wanted->low >= range.high) {
        return 0;
    }
    *wanted = range;
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
    const char *min_bytes = getenv(RECORDS_MIN_BYTES);
    if (folder == NULL || min_bytes == NULL) {
        return;
    }
    memcpy(&allocator.low, &real.malloc, sizeof allocator.low);
    own.low = (uintptr_t)room;
    (void)dl_iterate_phdr(note_range, &allocator);
    (void)dl_iterate_phdr(note_range, &own);
    if (pthread_atfork(table_before_fork, parent_goes_on, child_begins) == 0) {
        table_open(folder, strtoull(min_bytes, NULL, 10));
    }
}

__attribute__((destructor)) static void end(void) {
    table_show(MOMENT_EXIT);
}
