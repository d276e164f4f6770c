/* Section 4.4 and table 1 of Valat, "Impact of the Operating System Memory Allocation on CPU Intensive
 * Applications": X[i] = Y[i-1]. The load of one iteration follows the store of the previous one. If X and Y
 * start at the same offset modulo 4 KiB, both addresses share the low 12 bits, by which a CPU first compares
 * a load with earlier stores. Newer CPUs quickly detect that such a store is unrelated to the load, except
 * if it is between the load and the store that the load reads from, as in the mesh. Only the heads of the
 * arrays are used, which fit into L1. */
#include "arrays.h"
#include "support.h"

#include <stdint.h>
#include <stdio.h>

static const char program_name[] = "alias4k";

enum variant { VARIANT_ORIGINAL, VARIANT_REWRITTEN };
enum work { WORK_MOVE, WORK_MESH };
enum memory { MEMORY_MMAP, MEMORY_MALLOC, MEMORY_PADDED };

static const char *const variant_names[] = {"original", "rewritten", NULL};
static const char *const work_names[] = {"move", "mesh", NULL};
static const char *const memory_names[] = {"mmap", "malloc", "padded", NULL};

enum { MOST_STREAMS = 8, MOST_ARRAYS = 2 * MOST_STREAMS };

/* A stream has an X and a Y. In these tables one more follows, the first once more. */
struct meshes {
    uint64_t *x[MOST_STREAMS + 1];
    uint64_t *y[MOST_STREAMS + 1];
};

/* Here the compiler must take it that a number has changed in its register. Nothing is executed, but the
 * loops stay what the source says: one load and one store of eight bytes for each element, in this order,
 * where an optimizer would otherwise see that it may copy whole vectors at once, or call memmove. */
#define IN_REGISTER(number) __asm__ volatile("" : "+r"(number))

/* And here, that memory has: what was stored is loaded again, as must be where arrays could be parts of
 * others. */
#define MEMORY_CHANGES() __asm__ volatile("" ::: "memory")

#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

/* What the meshes interpolate: each stream's X from the next one's Y, and its Y from its X. */
static inline uint64_t x_of(uint64_t y) {
    return y + 1;
}

static inline uint64_t y_of(uint64_t x) {
    return 3 * x;
}

static inline void original_move(const struct meshes *meshes, unsigned long streams, unsigned long count) {
    for (unsigned long i = 1; i < count; i++) {
        for (unsigned long k = 0; k < streams; k++) {
            uint64_t loaded = meshes->y[k][i - 1];
            IN_REGISTER(loaded);
            meshes->x[k][i] = loaded;
        }
    }
}

/* The loop over the streams stays one: its loads read from another store each time, which no CPU foresees. */
static __attribute__((noinline)) void original_mesh(const struct meshes *meshes, unsigned long streams,
                                                    unsigned long count) {
    for (unsigned long i = 1; i < count; i++) {
        for (unsigned long k = 0; k < streams; k++) {
            meshes->x[k][i] = x_of(meshes->y[k + 1][i - 1]);
            meshes->y[k][i] = y_of(meshes->x[k][i - 1]);
            MEMORY_CHANGES();
        }
    }
}

/* The paper's loops, of one stream and of two, are compiled as such. */
static __attribute__((noinline)) void original_moves(const struct meshes *meshes, unsigned long streams,
                                                     unsigned long count) {
    if (streams == 1) {
        original_move(meshes, 1, count);
    } else if (streams == 2) {
        original_move(meshes, 2, count);
    } else {
        original_move(meshes, streams, count);
    }
}

/* By hand, so that no load comes after a store to the same index: what the next iteration needs is loaded
 * before this one's stores, and carried in registers. */
static inline __attribute__((always_inline)) void rewritten_move(const struct meshes *meshes,
                                                                 unsigned long streams, unsigned long count) {
    uint64_t carried[MOST_STREAMS] = {0};
    UNROLLED
    for (unsigned long k = 0; k < streams; k++) {
        carried[k] = meshes->y[k][0];
    }
    for (unsigned long i = 1; i < count; i++) {
        uint64_t next[MOST_STREAMS] = {0};
        UNROLLED
        for (unsigned long k = 0; k < streams; k++) {
            next[k] = meshes->y[k][i];
            IN_REGISTER(next[k]);
        }
        UNROLLED
        for (unsigned long k = 0; k < streams; k++) {
            meshes->x[k][i] = carried[k];
            carried[k] = next[k];
        }
    }
}

/* The same, where what was stored is kept at hand: of X and Y nothing is loaded but the first elements. */
static inline __attribute__((always_inline)) void rewritten_mesh(const struct meshes *meshes,
                                                                 unsigned long streams, unsigned long count) {
    uint64_t x[MOST_STREAMS] = {0};
    uint64_t y[MOST_STREAMS + 1] = {0};
    UNROLLED
    for (unsigned long k = 0; k < streams; k++) {
        x[k] = meshes->x[k][0];
        y[k] = meshes->y[k][0];
    }
    for (unsigned long i = 1; i < count; i++) {
        y[streams] = y[0];
        UNROLLED
        for (unsigned long k = 0; k < streams; k++) {
            uint64_t next_x = x_of(y[k + 1]);
            uint64_t next_y = y_of(x[k]);
            IN_REGISTER(next_x);
            IN_REGISTER(next_y);
            meshes->x[k][i] = x[k] = next_x;
            meshes->y[k][i] = y[k] = next_y;
        }
    }
}

/* One for each number of streams, for registers have no index. */
#define FOR_EACH_NUMBER(name, one)                                                                 \
    static __attribute__((noinline)) void name(const struct meshes *meshes, unsigned long streams, \
                                               unsigned long count) {                              \
        switch (streams) {                                                                         \
        case 1:                                                                                    \
            one(meshes, 1, count);                                                                 \
            break;                                                                                 \
        case 2:                                                                                    \
            one(meshes, 2, count);                                                                 \
            break;                                                                                 \
        case 3:                                                                                    \
            one(meshes, 3, count);                                                                 \
            break;                                                                                 \
        case 4:                                                                                    \
            one(meshes, 4, count);                                                                 \
            break;                                                                                 \
        case 5:                                                                                    \
            one(meshes, 5, count);                                                                 \
            break;                                                                                 \
        case 6:                                                                                    \
            one(meshes, 6, count);                                                                 \
            break;                                                                                 \
        case 7:                                                                                    \
            one(meshes, 7, count);                                                                 \
            break;                                                                                 \
        default:                                                                                   \
            one(meshes, MOST_STREAMS, count);                                                      \
            break;                                                                                 \
        }                                                                                          \
    }
FOR_EACH_NUMBER(rewritten_moves, rewritten_move)
FOR_EACH_NUMBER(rewritten_meshes, rewritten_mesh)

typedef void loop(const struct meshes *meshes, unsigned long streams, unsigned long count);

static loop *const loops[2][2] = {
    [VARIANT_ORIGINAL] = {[WORK_MOVE] = original_moves, [WORK_MESH] = original_mesh},
    [VARIANT_REWRITTEN] = {[WORK_MOVE] = rewritten_moves, [WORK_MESH] = rewritten_meshes},
};

/* What one cycle of this CPU takes now: an addition that waits for the one before it takes one. */
static double ns_per_cycle(void) {
    enum { ADDITIONS = 8, ROUNDS = 2000000 };
    unsigned long sum = 0;
    double best = 0;
    for (int try = 0; try < 5; try++) {
        double begin = now_seconds();
        for (unsigned long i = 0; i < ROUNDS; i++) {
            for (int k = 0; k < ADDITIONS; k++) {
                sum += i;
                IN_REGISTER(sum);
            }
        }
        double spent = now_seconds() - begin;
        best = best == 0 || spent < best ? spent : best;
    }
    return best / ((double)ADDITIONS * ROUNDS) * 1e9;
}

static uint64_t value(unsigned long array, unsigned long element) {
    return checksum_add(array, element);
}

static void expect(uint64_t found, uint64_t expected, unsigned long long *checksum) {
    if (found != expected) {
        fail(program_name, "an array does not hold what was made for it");
    }
    *checksum = checksum_add(*checksum, found);
}

/* However often it was done: X is Y, one behind; or both are what their first elements make of them. */
static unsigned long long check(const struct meshes *meshes, unsigned long streams, unsigned long count,
                                enum work work) {
    unsigned long long checksum = 0;
    uint64_t x[MOST_STREAMS] = {0};
    uint64_t y[MOST_STREAMS] = {0};
    for (unsigned long k = 0; k < streams; k++) {
        x[k] = value(2 * k, 0);
        y[k] = value(2 * k + 1, 0);
    }
    for (unsigned long i = 0; i < count; i++) {
        for (unsigned long k = 0; k < streams; k++) {
            expect(meshes->x[k][i], x[k], &checksum);
            expect(meshes->y[k][i], y[k], &checksum);
        }
        uint64_t first = y[0];
        for (unsigned long k = 0; k < streams; k++) {
            uint64_t x_before = x[k];
            x[k] = work == WORK_MOVE ? y[k] : x_of(k + 1 == streams ? first : y[k + 1]);
            y[k] = work == WORK_MOVE ? value(2 * k + 1, i + 1) : y_of(x_before);
        }
    }
    return checksum;
}

static struct array have_array(enum memory memory, size_t bytes, size_t offset, unsigned long number,
                               unsigned long count) {
    if (memory == MEMORY_MALLOC) {
        return array_malloc(program_name, bytes);
    }
    if (memory == MEMORY_PADDED) {
        return array_padded(program_name, bytes, number, count);
    }
    /* Each starts by the offset further than the one before it: Y than its X. */
    struct array array = array_mapped(program_name, bytes + ALIAS_BYTES, HUGE_SYSTEM);
    array.start = (char *)array.start + number * offset % ALIAS_BYTES;
    return array;
}

int main(int argc, char **argv) {
    unsigned long offset = 0;
    unsigned long streams = 1;
    unsigned long variant = VARIANT_ORIGINAL;
    unsigned long work = WORK_MOVE;
    unsigned long memory = MEMORY_MMAP;
    unsigned long bytes = 1UL << 20;
    unsigned long head = 4096;
    unsigned long repeats = 100000;
    const struct option_spec options[] = {
        {"offset", "mmap: bytes modulo 4096 from X's start to Y's (default 0)", OPTION_COUNT, &offset, 0,
         4095, NULL},
        {"streams", "pairs of X and Y in the loop", OPTION_COUNT, &streams, 1, MOST_STREAMS, NULL},
        {"variant", "the plain loop, or one that loads ahead and keeps the value in a register",
         OPTION_CHOICE, &variant, 0, 0, variant_names},
        {"work", "compute X from Y only, or each from the other", OPTION_CHOICE, &work, 0, 0, work_names},
        {"memory", "mappings, blocks from the allocator, or such blocks padded by hand", OPTION_CHOICE,
         &memory, 0, 0, memory_names},
        {"bytes", "bytes in an array", OPTION_COUNT, &bytes, 16, 1UL << 34, NULL},
        {"head", "bytes of each array that are used", OPTION_COUNT, &head, 16, 1UL << 34, NULL},
        {"repeats", "timed passes", OPTION_COUNT, &repeats, 1, 1000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Repeatedly copies arrays to others, shifted by one element.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (offset % sizeof(uint64_t) != 0) {
        reject_arguments(program_name, "--offset is no multiple of 8");
    }
    if (memory != MEMORY_MMAP && offset != 0) {
        reject_arguments(program_name, "--offset is for --memory mmap");
    }
    if (head % sizeof(uint64_t) != 0) {
        reject_arguments(program_name, "--head is no multiple of 8");
    }
    if (head > bytes) {
        reject_arguments(program_name, "--head is more than --bytes");
    }

    unsigned long count = head / sizeof(uint64_t);
    struct array blocks[MOST_ARRAYS] = {0};
    void *starts[MOST_ARRAYS] = {0};
    struct meshes meshes = {0};
    /* In the order X1, Y1, X2, Y2, ...; and then the first stream's once more. */
    for (unsigned long k = 0; k < 2 * streams; k++) {
        blocks[k] = have_array((enum memory)memory, bytes, offset, k, 2 * streams);
        starts[k] = blocks[k].start;
        uint64_t *array = starts[k];
        (k % 2 == 0 ? meshes.x : meshes.y)[k / 2] = array;
        for (unsigned long i = 0; i < count; i++) {
            array[i] = value(k, i);
        }
    }
    meshes.x[streams] = meshes.x[0];
    meshes.y[streams] = meshes.y[0];
    loop *pass = loops[variant][work];
    pass(&meshes, streams, count); /* warms up */
    double seconds = now_seconds();
    for (unsigned long repeat = 0; repeat < repeats; repeat++) {
        MEMORY_CHANGES(); /* no pass is like the one before it, for all the compiler knows */
        pass(&meshes, streams, count);
    }
    seconds = now_seconds() - seconds;
    double cycle_ns = ns_per_cycle();
    unsigned long long checksum = check(&meshes, streams, count, (enum work)work);

    /* An iteration moves one element of each stream. */
    double ns = seconds / ((double)repeats * (double)(count - 1)) * 1e9;
    printf(
        "{\"workload\": \"alias4k\", \"offset\": %lu, \"streams\": %lu, \"variant\": \"%s\", \"work\": "
        "\"%s\", "
        "\"memory\": \"%s\", \"bytes\": %lu, \"head\": %lu, \"repeats\": %lu, \"distance\": %lu, "
        "\"distinct_starts\": %lu, \"checksum\": \"%016llx\", \"seconds\": %.6f, \"ns_per_element\": %.4f, "
        "\"ns_per_iteration\": %.4f, \"cycles_per_iteration\": %.3f}\n",
        offset, streams, variant_names[variant], work_names[work], memory_names[memory], bytes, head, repeats,
        (unsigned long)(((uintptr_t)starts[1] - (uintptr_t)starts[0]) % ALIAS_BYTES),
        distinct_starts(starts, 2 * streams), checksum, seconds, ns / (double)streams, ns, ns / cycle_ns);
    for (unsigned long k = 0; k < 2 * streams; k++) {
        array_free(&blocks[k]);
    }
    return 0;
}
