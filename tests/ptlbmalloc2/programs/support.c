#include "cases.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

void say(const char *name, size_t value) {
    printf("%s %zu\n", name, value);
}

/* Without a stream: its buffer would lie on top of the heap that is being measured. */
size_t resident_bytes(void) {
    char text[128] = "";
    int descriptor = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0 && read(descriptor, text, sizeof text - 1) > 0 && close(descriptor) == 0);
    char *second;
    strtoul(text, &second, 10);
    return strtoul(second, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
}

size_t grown_since(size_t resident_before) {
    size_t now = resident_bytes();
    return now > resident_before ? now - resident_before : 0;
}

/* Not the same byte everywhere: a block that overlaps another, shifted, must not look right. */
static unsigned char byte_at(size_t i, unsigned char mark) {
    return (unsigned char)(mark + i / 512 * 7);
}

void fill(void *block, size_t bytes, unsigned char mark) {
    unsigned char *at = block;
    for (size_t i = 0; i < bytes; i += 512) {
        at[i] = byte_at(i, mark);
    }
    if (bytes > 0) {
        at[bytes - 1] = byte_at(bytes - 1, mark);
    }
}

void check_filled(const void *block, size_t bytes, unsigned char mark) {
    const unsigned char *at = block;
    for (size_t i = 0; i < bytes; i += 512) {
        CHECK(at[i] == byte_at(i, mark));
    }
}

struct start {
    void (*body)(size_t thread);
    size_t thread;
};

static void *run(void *argument) {
    struct start *start = argument;
    start->body(start->thread);
    return NULL;
}

void run_threads(size_t count, void (*body)(size_t thread)) {
    pthread_t threads[MAX_THREADS];
    struct start starts[MAX_THREADS];
    pthread_attr_t attributes;
    CHECK(count <= MAX_THREADS);
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 256 * KIB) == 0);
    for (size_t i = 0; i < count; i++) {
        starts[i] = (struct start){body, i};
        CHECK(pthread_create(&threads[i], &attributes, run, &starts[i]) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/* The rows lie outside of the heap, which holds the blocks and nothing else. */
struct blocks allocate_blocks(size_t count, size_t bytes) {
    struct blocks blocks = {.count = count, .bytes = bytes};
    blocks.rows =
        mmap(NULL, count * sizeof(void *), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(blocks.rows != MAP_FAILED);
    for (size_t i = 0; i < count; i++) {
        blocks.rows[i] = malloc(bytes);
        CHECK(blocks.rows[i] != NULL);
        fill(blocks.rows[i], bytes, (unsigned char)i);
    }
    return blocks;
}

void free_blocks(struct blocks *blocks, enum order order) {
    uint64_t random = 12345;
    for (size_t i = 0; i < blocks->count; i++) {
        check_filled(blocks->rows[i], blocks->bytes, (unsigned char)i);
    }
    for (size_t left = blocks->count; left > 0; left--) {
        size_t take = left - 1;
        if (order == IN_ORDER) {
            take = blocks->count - left;
        } else if (order == RANDOM) {
            take = check_random(&random) % left;
        }
        void *block = blocks->rows[take];
        if (order == RANDOM) {
            blocks->rows[take] = blocks->rows[left - 1];
        }
        free(block);
    }
    CHECK(munmap(blocks->rows, blocks->count * sizeof(void *)) == 0);
}

static size_t number_after(const char *text, const char *name) {
    const char *at = strstr(text, name);
    CHECK(at != NULL);
    return strtoull(at + strlen(name), NULL, 10);
}

void check_accounting(void) {
    static char text[256 * KIB];
    static const char current[] = "<system type=\"current\" size=\"";
    static char buffer[256 * KIB];
    FILE *stream = fmemopen(text, sizeof text, "w");
    CHECK(stream != NULL && setvbuf(stream, buffer, _IOFBF, sizeof buffer) == 0);
    /* Nothing is freed between the two, or a trim might come between them. */
    CHECK(malloc_info(0, stream) == 0);
    struct mallinfo2 info = mallinfo2();
    CHECK(fclose(stream) == 0);
    size_t sum = 0;
    const char *total = text;
    for (const char *heap = text; (heap = strstr(heap, "<heap nr=\"")) != NULL; heap++) {
        sum += number_after(heap, current);
        total = strstr(heap, "</heap>");
        CHECK(total != NULL);
    }
    CHECK(total != text && number_after(total, current) == sum);
    CHECK(info.fordblks + info.uordblks == info.arena);
    CHECK(info.arena == sum);
}

static void add_filter(struct sock_filter *filter, size_t count) {
    struct sock_fprog program = {.len = (unsigned short)count, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        fprintf(stderr, "no seccomp filter may be installed here\n");
        _Exit(CANNOT);
    }
}

void deny_process_madvise(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_madvise, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    add_filter(filter, sizeof filter / sizeof filter[0]);
}

void deny_wipe_on_fork(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_WIPEONFORK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    add_filter(filter, sizeof filter / sizeof filter[0]);
}
