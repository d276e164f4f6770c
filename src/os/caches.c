#include "os/caches.h"

#include "os/file.h"
#include "os/text.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* More than there are: L1 has two. */
#define INDEX_MOST 16

static bool is_digit(char byte) {
    return byte >= '0' && byte <= '9';
}

/* Where the digits end; a number that is too long is nonsense anyway. */
static const char *read_number(const char *text, size_t *number) {
    *number = 0;
    while (is_digit(*text)) {
        *number = *number * 10 + (size_t)(*text++ - '0');
    }
    return text;
}

/* The file of a cache; false if there is none. */
static bool read_of(const char *root, unsigned index, const char *name, char *text, size_t size) {
    struct text path;
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/sys/devices/system/cpu/cpu0/cache/index");
    text_number(&path, index);
    text_string(&path, "/");
    text_string(&path, name);
    if (!text_end(&path)) {
        return false;
    }
    return file_read(path.bytes, text, size) > 0;
}

static size_t number_of(const char *root, unsigned index, const char *name) {
    char text[64];
    size_t number = 0;
    if (read_of(root, index, name, text, sizeof text)) {
        const char *unit = read_number(text, &number);
        number <<= *unit == 'K' ? 10 : *unit == 'M' ? 20 : 0;
    }
    return number;
}

/* How many CPUs a list such as "0-3,8" names; at least 1. */
static unsigned cpus_of(const char *root, unsigned index) {
    char text[1024];
    unsigned cpus = 0;
    if (read_of(root, index, "shared_cpu_list", text, sizeof text)) {
        for (const char *at = text; is_digit(*at);) {
            size_t first;
            at = read_number(at, &first);
            size_t last = first;
            if (*at == '-') {
                at = read_number(at + 1, &last);
            }
            cpus += last < first ? 1 : (unsigned)(last - first + 1);
            at += *at == ',';
        }
    }
    return cpus == 0 ? 1 : cpus;
}

/* What a cache must have to be one; what it does not say of its sets follows from the rest. */
static bool is_whole(struct os_cache *cache) {
    if (cache->level == 0 || cache->bytes == 0 || cache->line_bytes == 0 ||
        (cache->line_bytes & (cache->line_bytes - 1)) != 0) {
        return false;
    }
    /* A fully associative one says 0. */
    if (cache->ways == 0) {
        cache->ways = (unsigned)(cache->bytes / cache->line_bytes);
    }
    cache->sets = cache->ways == 0 ? 0 : cache->bytes / cache->line_bytes / cache->ways;
    return cache->sets > 0;
}

static size_t of_kernel(const char *root, struct os_cache *caches, size_t most) {
    size_t count = 0;
    char type[32];
    for (unsigned index = 0;
         index < INDEX_MOST && count < most && read_of(root, index, "type", type, sizeof type); index++) {
        struct os_cache *cache = &caches[count];
        *cache = (struct os_cache){
            .level = (unsigned)number_of(root, index, "level"),
            .bytes = number_of(root, index, "size"),
            .ways = (unsigned)number_of(root, index, "ways_of_associativity"),
            .line_bytes = number_of(root, index, "coherency_line_size"),
            .cpus = cpus_of(root, index),
        };
        count += strncmp(type, "Instruction", strlen("Instruction")) != 0 && is_whole(cache);
    }
    return count;
}

/* Leaf 4 of Intel's manual, volume 2A, CPUID; AMD's has the same form. */
static size_t of_processor(struct os_cache *caches, size_t most) {
    size_t count = 0;
#if defined(__x86_64__)
    enum { LEAF_INTEL = 4, LEAF_AMD = 0x8000001d, INSTRUCTIONS = 2 };
    const unsigned leaves[] = {LEAF_INTEL, LEAF_AMD};
    for (size_t i = 0; i < sizeof leaves / sizeof leaves[0] && count == 0; i++) {
        for (unsigned index = 0; index < INDEX_MOST && count < most; index++) {
            unsigned eax;
            unsigned ebx;
            unsigned ecx;
            unsigned edx;
            if (__get_cpuid_count(leaves[i], index, &eax, &ebx, &ecx, &edx) == 0 || (eax & 31) == 0) {
                break;
            }
            struct os_cache *cache = &caches[count];
            *cache = (struct os_cache){
                .level = eax >> 5 & 7,
                .ways = (ebx >> 22) + 1,
                .line_bytes = (ebx & 0xfff) + 1,
                .cpus = (eax >> 14 & 0xfff) + 1,
            };
            cache->bytes =
                cache->ways * ((size_t)(ebx >> 12 & 0x3ff) + 1) * cache->line_bytes * ((size_t)ecx + 1);
            count += (eax & 31) != INSTRUCTIONS && is_whole(cache);
        }
    }
#else
    (void)caches;
    (void)most;
#endif
    return count;
}

size_t os_caches(const char *root, struct os_cache *caches, size_t most) {
    bool machine = *root == '\0';
    size_t count = !machine || file_may_open() ? of_kernel(root, caches, most) : 0;
    return count > 0 || !machine ? count : of_processor(caches, most);
}
