/*
 * A shared object with the archive in it, such as a plugin, must stay when dlclose is called: the helper's
 * code is there, and the descriptor of a restartable sequence, which the kernel may read later. The linker's
 * option -z nodelete does the same, but a build may lack it.
 *
 * dlopen is looked up in the C library, as a reference would make linkers warn where a static program has it,
 * and be unresolved before glibc 2.34, where it is in libdl. musl unloads nothing.
 */
#include "api/pin.h"

#include "os/symbols.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef void *dlopen_function(const char *name, int mode);

static bool pin_is_in(const struct dl_phdr_info *module, uintptr_t address) {
    for (size_t i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &module->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && address - module->dlpi_addr - part->p_vaddr < part->p_memsz) {
            return true;
        }
    }
    return false;
}

static int pin_find_own(struct dl_phdr_info *module, size_t size, void *name) {
    (void)size;
    bool own = pin_is_in(module, (uintptr_t)pin_own_object);
    if (own) {
        *(const char **)name = module->dlpi_name;
    }
    return own;
}

void pin_own_object(void) {
    const char *name = NULL;
    dl_iterate_phdr(pin_find_own, &name);
    if (name == NULL || *name == '\0') {
        return; /* the program, which is the first of all, has no name */
    }
    any_function found = symbols_find("libc.so.", "dlopen");
    dlopen_function *open = (dlopen_function *)(found != NULL ? found : symbols_find("libdl.so.", "dlopen"));
    if (open != NULL) {
        open(name, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
}
