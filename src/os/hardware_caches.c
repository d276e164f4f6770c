#include "os/hardware_caches.h"

#include "os/cpus.h"
#include "os/file.h"
#include "os/text.h"
#include "os/thread.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define MAX_INDEX 16 /* above the number of caches that machines have; L1 has two */

static const char *hardware_cache_path(char *path, const char *root, unsigned index, const char *name) {
    return text_print(path, FILE_MAX_PATH, "%s/sys/devices/system/cpu/cpu0/cache/index%u/%s", root, index,
                      name);
}

/* Returns the start of a file that describes a cache, or the empty string. */
static const char *read_of(const char *root, unsigned index, const char *name, char text[64]) {
    char path[FILE_MAX_PATH];
    if (file_read(hardware_cache_path(path, root, index, name), text, 64) <= 0) {
        text[0] = '\0';
    }
    return text;
}

/* Returns a number such as "12" or "48K", or 0 if there is none. */
static size_t number_of(const char *root, unsigned index, const char *name) {
    char text[64];
    uint64_t number;
    const char *unit = parse_number(read_of(root, index, name, text), &number);
    return number << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : 0);
}

static unsigned cpus_of(const char *root, unsigned index) {
    char path[FILE_MAX_PATH];
    struct cpu_set cpus;
    return cpu_set_read(&cpus, hardware_cache_path(path, root, index, "shared_cpu_list"))
               ? cpu_set_count(&cpus)
               : 1;
}

/* Completes the description. Returns false if it does not describe a cache. */
static bool complete(struct hardware_cache *cache) {
    if (cache->level == 0 || cache->bytes == 0 || cache->line_bytes == 0 ||
        (cache->line_bytes & (cache->line_bytes - 1)) != 0) {
        return false;
    }
    if (cache->ways == 0) { /* the cache is fully associative */
        cache->ways = (unsigned)(cache->bytes / cache->line_bytes);
    }
    cache->sets = cache->ways == 0 ? 0 : cache->bytes / cache->line_bytes / cache->ways;
    return cache->sets > 0;
}

static size_t read_from_kernel(const char *root, struct hardware_cache *caches, size_t max) {
    size_t count = 0;
    char type[64];
    for (unsigned index = 0; index < MAX_INDEX && count < max && *read_of(root, index, "type", type) != '\0';
         index++) {
        struct hardware_cache *cache = &caches[count];
        *cache = (struct hardware_cache){
            .level = (unsigned)number_of(root, index, "level"),
            .bytes = number_of(root, index, "size"),
            .ways = (unsigned)number_of(root, index, "ways_of_associativity"),
            .line_bytes = number_of(root, index, "coherency_line_size"),
            .cpus = cpus_of(root, index),
        };
        count += strncmp(type, "Instruction", strlen("Instruction")) != 0 && complete(cache);
    }
    return count;
}

/* Intel's manual, volume 2A, describes leaf 4 of CPUID. AMD's leaf has the same
 * format. */
static size_t read_from_processor(struct hardware_cache *caches, size_t max) {
    size_t count = 0;
#if defined(__x86_64__)
    enum { LEAF_INTEL = 4, LEAF_AMD = 0x8000001d, INSTRUCTIONS = 2 };
    const unsigned leaves[] = {LEAF_INTEL, LEAF_AMD};
    for (size_t i = 0; i < sizeof leaves / sizeof leaves[0] && count == 0; i++) {
        for (unsigned index = 0; index < MAX_INDEX && count < max; index++) {
            unsigned eax, ebx, ecx, edx;
            if (__get_cpuid_count(leaves[i], index, &eax, &ebx, &ecx, &edx) == 0 || (eax & 31) == 0) {
                break;
            }
            struct hardware_cache *cache = &caches[count];
            *cache = (struct hardware_cache){
                .level = eax >> 5 & 7,
                .ways = (ebx >> 22) + 1,
                .line_bytes = (ebx & 0xfff) + 1,
                .cpus = (eax >> 14 & 0xfff) + 1,
            };
            cache->bytes =
                cache->ways * ((size_t)(ebx >> 12 & 0x3ff) + 1) * cache->line_bytes * ((size_t)ecx + 1);
            count += (eax & 31) != INSTRUCTIONS && complete(cache);
        }
    }
#else
    (void)caches, (void)max;
#endif
    return count;
}

size_t hardware_caches_read(const char *root, struct hardware_cache *caches, size_t max) {
    bool machine = *root == '\0';
    size_t count = !machine || thread_may_open_files() ? read_from_kernel(root, caches, max) : 0;
    return count > 0 || !machine ? count : read_from_processor(caches, max);
}
