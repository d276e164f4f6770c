/*
 * Keeps the shared object that contains the archive, such as a plugin, when
 * dlclose is called. The object has the helper's code. It also has the
 * descriptor of a restartable sequence, which the kernel may read later. The
 * linker's option -z nodelete has the same effect, but a build may lack it.
 *
 * dlopen is looked up in the C library. A reference to dlopen would make
 * linkers warn about static programs. It would be unresolved before glibc 2.34,
 * where dlopen is in libdl. musl unloads nothing.
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
        return; /* the program, which comes first, has no name */
    }
    any_function found = symbols_find("libc.so.", "dlopen");
    dlopen_function *open = (dlopen_function *)(found != NULL ? found : symbols_find("libdl.so.", "dlopen"));
    if (open != NULL) {
        open(name, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
}
