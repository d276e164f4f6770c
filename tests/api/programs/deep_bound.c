/*
 * Libraries that find libc's functions past those of a preloaded library: deep_bound CASE. They are opened
 * with RTLD_DEEPBIND, or call what dlsym finds by a handle. Blocks cross between them, libc and the program.
 */
#include "deep_bound.h"
#include "api.h"

#include <dlfcn.h>
#include <link.h>
#include <malloc.h>
#include <string.h>
#include <sys/syscall.h>

#ifndef SYS_mseal
#define SYS_mseal 462
#endif

/* Found beside the program, by its RUNPATH. */
#define PLUGIN "deep_plugin.so"

static void *(*allocate_there)(enum kind, size_t);
static void (*free_there)(void *);
static void *(*realloc_there)(void *, size_t);
static size_t (*usable_there)(void *);

int whose(void) {
    return OF_PROGRAM;
}

/* dlsym's result in *into. */
static void find(void *library, const char *name, void *into) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    memcpy(into, &found, sizeof found);
}

static void exchange(size_t seed) {
    for (size_t bytes = 1 + seed; bytes < 400 * KIB; bytes += bytes / 2 + 1) {
        for (enum kind kind = 0; kind < KINDS; kind++) {
            void *theirs = allocate_there(kind, bytes);
            CHECK(theirs != NULL);
            size_t usable = malloc_usable_size(theirs);
            CHECK(usable >= bytes && usable_there(theirs) == usable);
            theirs = realloc(theirs, 2 * bytes);
            CHECK(theirs != NULL);
            free(theirs);
            free_there(allocate_there(kind, bytes));
            void *ours = malloc(bytes);
            CHECK(ours != NULL && usable_there(ours) >= bytes);
            ours = realloc_there(ours, 2 * bytes);
            CHECK(ours != NULL);
            free_there(ours);
            free_there(strdup("of libc"));
        }
    }
}

static void *open_plugin(const char *path, int flags) {
    void *plugin = dlopen(path, flags);
    if (plugin == NULL) {
        fprintf(stderr, "%s\n", dlerror());
    }
    CHECK(plugin != NULL && dlerror() == NULL);
    find(plugin, "plugin_allocate", &allocate_there);
    find(plugin, "plugin_free", &free_there);
    find(plugin, "plugin_realloc", &realloc_there);
    find(plugin, "plugin_usable_size", &usable_there);
    return plugin;
}

static void use_plugin(void *plugin, int finds) {
    int (*plugin_finds_there)(void);
    void *(*first)(enum kind);
    find(plugin, "plugin_finds", &plugin_finds_there);
    find(plugin, "plugin_first", &first);
    CHECK_EQUAL(plugin_finds_there(), finds);
    for (enum kind kind = 0; kind < KINDS; kind++) {
        free(first(kind));
    }
    exchange(0);
    run_threads(3, exchange);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        exchange(3);
        _exit(0);
    }
    check_child(child);
}

static void deep(const char *unused) {
    (void)unused;
    use_plugin(open_plugin(PLUGIN, RTLD_NOW | RTLD_DEEPBIND), OF_PLUGIN);
}

static void deep_lazy(const char *unused) {
    (void)unused;
    use_plugin(open_plugin(PLUGIN, RTLD_LAZY | RTLD_DEEPBIND), OF_PLUGIN);
}

static void open_deep(size_t thread) {
    (void)thread;
    CHECK(dlopen(PLUGIN, RTLD_NOW | RTLD_DEEPBIND) != NULL);
    void *library = dlopen("libm.so.6", RTLD_NOW);
    CHECK(library != NULL && (!governed() || dlsym(library, "free") == (void *)(uintptr_t)free));
}

/* Several threads open such libraries first of all. */
static void deep_threads(const char *unused) {
    (void)unused;
    run_threads(8, open_deep);
    use_plugin(open_plugin(PLUGIN, RTLD_NOW | RTLD_DEEPBIND), OF_PLUGIN);
}

/* In the same namespace, dlmopen is dlopen. */
static void deep_dlmopen(const char *unused) {
    (void)unused;
    CHECK(dlmopen(LM_ID_BASE, PLUGIN, RTLD_NOW | RTLD_DEEPBIND) != NULL);
    use_plugin(open_plugin(PLUGIN, RTLD_NOW | RTLD_NOLOAD), OF_PLUGIN);
}

/* Without the flag, nothing changes. */
static void shallow(const char *unused) {
    (void)unused;
    use_plugin(open_plugin(PLUGIN, RTLD_NOW), OF_PROGRAM);
}

static int seal_libc(struct dl_phdr_info *info, size_t size, void *sealed) {
    (void)size;
    for (size_t i = 0; strstr(info->dlpi_name, "/libc.so.") != NULL && i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_offset == 0) {
            uintptr_t bytes = (part->p_memsz + 4095) & ~(uintptr_t)4095;
            *(long *)sealed = syscall(SYS_mseal, info->dlpi_addr + part->p_vaddr, bytes, 0);
            return 1;
        }
    }
    return 0;
}

/* Where libc's symbols cannot be changed, the flag has no effect, and blocks cross nevertheless. */
static void deep_sealed(const char *unused) {
    (void)unused;
    long sealed = -1;
    CHECK(dl_iterate_phdr(seal_libc, &sealed) == 1);
    if (sealed != 0) {
        fprintf(stderr, "no mseal\n");
        exit(CANNOT);
    }
    use_plugin(open_plugin(PLUGIN, RTLD_NOW | RTLD_DEEPBIND), OF_PROGRAM);
}

/* A namespace of its own has a malloc of its own. */
static void other_namespace(const char *unused) {
    (void)unused;
    void *plugin = dlmopen(LM_ID_NEWLM, PLUGIN, RTLD_NOW);
    CHECK(plugin != NULL);
    find(plugin, "plugin_allocate", &allocate_there);
    find(plugin, "plugin_free", &free_there);
    for (size_t bytes = 1; bytes < 400 * KIB; bytes += bytes / 2 + 1) {
        for (enum kind kind = 0; kind < KINDS; kind++) {
            void *block = allocate_there(kind, bytes);
            CHECK(block != NULL);
            free_there(block);
        }
    }
}

static void *allocate_by_handle(enum kind kind, size_t bytes) {
    static void *(*by_malloc)(size_t);
    static void *(*by_calloc)(size_t, size_t);
    if (by_malloc == NULL) {
        void *libc = dlopen("libc.so.6", RTLD_NOW);
        CHECK(libc != NULL);
        find(libc, "malloc", &by_malloc);
        find(libc, "calloc", &by_calloc);
    }
    return kind == KIND_CALLOC ? by_calloc(1, bytes) : by_malloc(bytes);
}

/* By the handle of libc, or of a library that is linked with it. */
static void by_handle(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    CHECK(handle != NULL);
    find(handle, "free", &free_there);
    find(handle, "realloc", &realloc_there);
    find(handle, "malloc_usable_size", &usable_there);
    CHECK(dlsym(handle, "no_such_function") == NULL && dlerror() != NULL && dlerror() == NULL);
    allocate_there = allocate_by_handle;
    free_there(strdup("of libc"));
    exchange(0);
    run_threads(3, exchange);
}

static void by_version(const char *version) {
    void *libc = dlopen("libc.so.6", RTLD_NOW);
    CHECK(libc != NULL);
    void *found = dlvsym(libc, "free", version);
    CHECK(found != NULL);
    memcpy(&free_there, &found, sizeof found);
    free_there(malloc(100));
    free_there(strdup("of libc"));
    CHECK(dlvsym(libc, "free", "NO_SUCH_VERSION") == NULL && dlerror() != NULL);
}

/* Which is the next definition depends on who asks. */
static void next(const char *unused) {
    (void)unused;
    CHECK(dlsym(RTLD_NEXT, "malloc") == (void *)(uintptr_t)malloc);
    CHECK(dlsym(RTLD_NEXT, "free") == dlsym(RTLD_DEFAULT, "free"));
    CHECK(dlsym(RTLD_DEFAULT, "whose") == (void *)(uintptr_t)whose);
    CHECK(dlsym(RTLD_NEXT, "whose") == NULL && dlerror() != NULL);
}

static void errors(const char *unused) {
    (void)unused;
    CHECK(dlopen("no-such-library.so", RTLD_NOW | RTLD_DEEPBIND) == NULL);
    const char *text = dlerror();
    CHECK(text != NULL && strstr(text, "no-such-library.so") != NULL && dlerror() == NULL);
    CHECK(dlopen(PLUGIN, RTLD_DEEPBIND) == NULL && dlerror() != NULL); /* neither now nor lazily */
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"deep", deep},
        {"deep-lazy", deep_lazy},
        {"deep-threads", deep_threads},
        {"deep-dlmopen", deep_dlmopen},
        {"deep-sealed", deep_sealed},
        {"shallow", shallow},
        {"other-namespace", other_namespace},
        {"by-handle", by_handle},
        {"by-version", by_version},
        {"next", next},
        {"errors", errors},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
