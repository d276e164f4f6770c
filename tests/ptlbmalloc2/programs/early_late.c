/* Allocation before and after main, and in a library that is loaded and unloaded. */
#include "cases.h"

#include <dlfcn.h>

static struct blocks early;
static void *late;

__attribute__((constructor)) static void before_main(void) {
    early = allocate_blocks(100, 50 * KIB);
    struct blocks gone = allocate_blocks(100, 50 * KIB);
    free_blocks(&gone, REVERSED);
}

static void at_exit(void) {
    check_filled(late, 300 * KIB, 3);
    free(late);
    late = malloc(200 * KIB);
    CHECK(late != NULL);
    fill(late, 200 * KIB, 4);
}

/* The program's, so it runs after at_exit. */
__attribute__((destructor)) static void after_main(void) {
    if (late != NULL) {
        check_filled(late, 200 * KIB, 4);
        free(late);
    }
    free_blocks(&early, IN_ORDER);
    struct blocks gone = allocate_blocks(50, 50 * KIB);
    free_blocks(&gone, IN_ORDER);
}

static const char *plugin_path;

static void open_and_close(size_t thread) {
    (void)thread;
    for (int i = 0; i < 20; i++) {
        void *plugin = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
        CHECK(plugin != NULL);
        size_t (*held)(void) = (size_t(*)(void))dlsym(plugin, "plugin_held_bytes");
        CHECK(held != NULL && held() > 0);
        CHECK(dlclose(plugin) == 0);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    plugin_path = argv[1];
    open_and_close(0);
    run_threads(4, open_and_close);
    late = malloc(300 * KIB);
    CHECK(late != NULL);
    fill(late, 300 * KIB, 3);
    CHECK(atexit(at_exit) == 0);
    return 0;
}
