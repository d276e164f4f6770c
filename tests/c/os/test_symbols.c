/* Functions found in loaded objects: in one made here, linked for no address and for its own, and in the
 * kernel's. */
#include "os/symbols.h"

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/auxv.h>

#include "check.h"

#define NAME "clock_of_sand"

enum { WORDS = 2 /* of a filter of one address */, FUNCTION_AT = 0x123 };

struct image {
    ElfW(Ehdr) header;
    ElfW(Phdr) part[2];
    ElfW(Dyn) dynamic[4];
    ElfW(Sym) symbol[2];
    uint32_t hash[4 + WORDS + 1 + 1]; /* one bucket, one symbol */
    char names[32];
};

static uint32_t hash_of(const char *name) {
    uint32_t hash = 5381;
    for (; *name != '\0'; name++) {
        hash = hash * 33 + (uint8_t)*name;
    }
    return hash;
}

/* All its addresses are written as if it lay there. Its table of hashes is in the new form, or in the old
 * one. */
static void make_image(struct image *image, uintptr_t base, ElfW(Sxword) table) {
    memset(image, 0, sizeof *image);
    image->header.e_phoff = offsetof(struct image, part);
    image->header.e_phnum = 2;
    image->part[0].p_type = PT_DYNAMIC;
    image->part[0].p_offset = offsetof(struct image, dynamic);
    image->part[0].p_vaddr = base + offsetof(struct image, dynamic);
    image->part[1].p_type = PT_LOAD;
    image->part[1].p_vaddr = base;
    image->dynamic[0].d_tag = DT_SYMTAB;
    image->dynamic[0].d_un.d_ptr = base + offsetof(struct image, symbol);
    image->dynamic[1].d_tag = DT_STRTAB;
    image->dynamic[1].d_un.d_ptr = base + offsetof(struct image, names);
    image->dynamic[2].d_tag = table;
    image->dynamic[2].d_un.d_ptr = base + offsetof(struct image, hash);
    strcpy(image->names + 1, NAME);
    image->symbol[1].st_name = 1;
    image->symbol[1].st_shndx = 1;
    image->symbol[1].st_value = base + FUNCTION_AT;
    const uint32_t hash[] = {1, 1, 1, 0, 0, 0, 1, hash_of(NAME) | 1};
    const uint32_t old[] = {1, 2, 1, 0, 0};
    memcpy(image->hash, table == DT_HASH ? old : hash, table == DT_HASH ? sizeof old : sizeof hash);
}

static struct image image;

#if defined(__GLIBC__)
#define C_LIBRARY "libc.so"
#else /* musl's is the dynamic linker, too */
#define C_LIBRARY "ld-musl-"
#endif

static void test_image(uintptr_t base, ElfW(Sxword) table) {
    make_image(&image, base, table);
    CHECK_EQUAL((uintptr_t)symbols_find_in_image(&image, NAME), (uintptr_t)&image + FUNCTION_AT);
    CHECK(symbols_find_in_image(&image, "clock_of_san") == NULL);
    image.symbol[1].st_shndx = SHN_UNDEF;
    CHECK(symbols_find_in_image(&image, NAME) == NULL);
    make_image(&image, base, table);
    image.part[1].p_type = PT_NOTE;
    CHECK(symbols_find_in_image(&image, NAME) == NULL);
}

int main(void) {
    for (unsigned old = 0; old < 2; old++) {
        ElfW(Sxword) table = old ? DT_HASH : DT_GNU_HASH;
        test_image(0, table);
        test_image((uintptr_t)&image, table);
        test_image((uintptr_t)-1 << 23, table); /* the kernel's half: the vDSO of gVisor */
    }
    CHECK(symbols_find_in_image(NULL, NAME) == NULL);
    const void *vdso = (const void *)getauxval(AT_SYSINFO_EHDR);
    CHECK(symbols_find_in_image(vdso, NAME) == NULL);
#ifdef __x86_64__
    CHECK((vdso == NULL) == (symbols_find_in_image(vdso, "__vdso_clock_gettime") == NULL));
#endif
    CHECK(symbols_find(C_LIBRARY, "getauxval") == (any_function)getauxval);
    CHECK(symbols_find(C_LIBRARY, NAME) == NULL);
    CHECK(symbols_find("libsand.so", "getauxval") == NULL);
    return 0;
}
