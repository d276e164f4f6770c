#include "os/symbols.h"

#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct symbol_search {
    const char *library;
    const char *name;
    any_function found;
};

/* The tables that a library's dynamic section refers to. */
struct symbols {
    const ElfW(Sym) * table;
    const char *names;
    const uint32_t *hash;   /* DT_GNU_HASH; or NULL */
    const uint32_t *counts; /* DT_HASH, whose second word is the number of symbols; or NULL */
};

/* Some C libraries replace the offsets in the section by addresses. The vDSO of
 * gVisor, like those of old kernels, is linked for the kernel's half of the
 * addresses. */
static const void *address(ElfW(Addr) base, ElfW(Addr) value) {
    bool is_linked_high = (intptr_t)value < 0;
    return (const void *)(value < base || is_linked_high ? value + base : value);
}

static struct symbols symbols_of(ElfW(Addr) base, const ElfW(Dyn) * entry) {
    struct symbols symbols = {0};
    for (; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB) {
            symbols.table = address(base, entry->d_un.d_ptr);
        } else if (entry->d_tag == DT_STRTAB) {
            symbols.names = address(base, entry->d_un.d_ptr);
        } else if (entry->d_tag == DT_GNU_HASH) {
            symbols.hash = address(base, entry->d_un.d_ptr);
        } else if (entry->d_tag == DT_HASH) {
            symbols.counts = address(base, entry->d_un.d_ptr);
        }
    }
    return symbols;
}

static uint32_t hash_of(const char *name) {
    uint32_t hash = 5381;
    for (; *name != '\0'; name++) {
        hash = hash * 33 + (uint8_t)*name;
    }
    return hash;
}

static bool is_named(const struct symbols *symbols, const ElfW(Sym) * symbol, const char *name) {
    return symbol->st_shndx != SHN_UNDEF && symbols_same_name(symbols->names + symbol->st_name, name);
}

/* The hash table begins with four words: the number of buckets, the number of
 * symbols that are not in the table, the filter's length in words, and the
 * filter's shift. The filter follows, and then the buckets, each of which holds
 * the number of its first symbol. The symbols' hashes come last. The last hash
 * of a bucket has its lowest bit set. */
static const ElfW(Sym) * look_up_hash(const struct symbols *symbols, const char *name) {
    uint32_t buckets = symbols->hash[0];
    uint32_t offset = symbols->hash[1];
    const uint32_t *bucket = symbols->hash + 4 + symbols->hash[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *hashes = bucket + buckets;
    uint32_t hash = hash_of(name);
    uint32_t number = buckets == 0 ? 0 : bucket[hash % buckets];
    if (number < offset || number == 0) {
        return NULL;
    }
    for (;; number++) {
        const ElfW(Sym) *symbol = &symbols->table[number];
        uint32_t known = hashes[number - offset];
        if ((known | 1) == (hash | 1) && is_named(symbols, symbol, name)) {
            return symbol;
        }
        if ((known & 1) != 0) {
            return NULL;
        }
    }
}

static const ElfW(Sym) * look_up(const struct symbols *symbols, const char *name) {
    if (symbols->hash != NULL) {
        return look_up_hash(symbols, name);
    }
    for (uint32_t number = 1; symbols->counts != NULL && number < symbols->counts[1]; number++) {
        if (is_named(symbols, &symbols->table[number], name)) {
            return &symbols->table[number];
        }
    }
    return NULL;
}

const ElfW(Sym) * symbols_look_up(ElfW(Addr) base, const ElfW(Dyn) * dynamic, const char *name) {
    struct symbols symbols = symbols_of(base, dynamic);
    return symbols.table != NULL && symbols.names != NULL ? look_up(&symbols, name) : NULL;
}

static any_function function_of(const struct dl_phdr_info *module, const char *name) {
    for (size_t i = 0; i < module->dlpi_phnum; i++) {
        if (module->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            const ElfW(Dyn) *dynamic = (const void *)(module->dlpi_addr + module->dlpi_phdr[i].p_vaddr);
            const ElfW(Sym) *symbol = symbols_look_up(module->dlpi_addr, dynamic, name);
            return symbol == NULL ? NULL : (any_function)(uintptr_t)(module->dlpi_addr + symbol->st_value);
        }
    }
    return NULL;
}

static int search_module(struct dl_phdr_info *module, size_t size, void *data) {
    (void)size;
    struct symbol_search *search = data;
    const char *slash = strrchr(module->dlpi_name, '/');
    const char *file = slash == NULL ? module->dlpi_name : slash + 1;
    if (strncmp(file, search->library, strlen(search->library)) != 0) {
        return 0;
    }
    search->found = function_of(module, search->name);
    return search->found != NULL;
}

any_function symbols_find(const char *library, const char *name) {
    struct symbol_search search = {library, name, NULL};
    dl_iterate_phdr(search_module, &search);
    return search.found;
}

any_function symbols_find_in_image(const void *header, const char *name) {
    const ElfW(Ehdr) *elf = header;
    if (elf == NULL) {
        return NULL;
    }
    struct dl_phdr_info module = {
        .dlpi_phdr = (const void *)((const char *)header + elf->e_phoff),
        .dlpi_phnum = elf->e_phnum,
    };
    for (size_t i = 0; i < module.dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &module.dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_offset == 0) {
            /* The difference is 0 for the vDSO of qemu-user, whose addresses
             * are already relocated. */
            module.dlpi_addr = (uintptr_t)header - part->p_vaddr;
            return function_of(&module, name);
        }
    }
    return NULL;
}

struct search_after {
    const ElfW(Dyn) * dynamic;
    const char *name;
    bool is_after;
    any_function found;
};

static int search_after(struct dl_phdr_info *module, size_t size, void *data) {
    (void)size;
    struct search_after *search = data;
    for (size_t i = 0; i < module->dlpi_phnum; i++) {
        if (module->dlpi_phdr[i].p_type != PT_DYNAMIC) {
            continue;
        }
        const ElfW(Dyn) *dynamic = (const void *)(module->dlpi_addr + module->dlpi_phdr[i].p_vaddr);
        const ElfW(Sym) *symbol =
            search->is_after ? symbols_look_up(module->dlpi_addr, dynamic, search->name) : NULL;
        search->is_after |= dynamic == search->dynamic;
        if (symbol != NULL) {
            search->found = (any_function)(uintptr_t)(module->dlpi_addr + symbol->st_value);
        }
    }
    return search->found != NULL;
}

any_function symbols_find_after(const ElfW(Dyn) * dynamic, const char *name) {
    struct search_after search = {dynamic, name, false, NULL};
    dl_iterate_phdr(search_after, &search);
    return search.found;
}
