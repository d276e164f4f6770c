/* Allocation before and after main, and in libraries that are loaded and unloaded. */
#include "api.h"
#include "names.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { HELD = 300 };

static void *early[HELD], *late;

static size_t bytes_of(size_t i) {
    return 1 + i * i * 7 % 70000;
}

#if !defined(__SANITIZE_ADDRESS__)
/* Before the constructors of any library but the C library's. */
static void *earliest;

static void before_constructors(int argc, char **argv, char **environment) {
    (void)argc, (void)argv, (void)environment;
    earliest = malloc(5000);
    CHECK(earliest != NULL);
    fill(earliest, 5000, 11);
    free(malloc(100));
}

#ifndef STATIC
__attribute__((section(".preinit_array"), used)) static void (*preinit)(int, char **,
                                                                        char **) = before_constructors;
#else
__attribute__((constructor(100 + 1))) static void instead(void) {
    before_constructors(0, NULL, NULL);
}
#endif
#endif

static void *in_early_thread(void *block) {
    free(block);
    return malloc(777);
}

__attribute__((constructor(101))) static void before_main(void) {
    for (size_t i = 0; i < HELD; i++) {
        early[i] = malloc(bytes_of(i));
        CHECK(early[i] != NULL);
        fill(early[i], bytes_of(i), i);
    }
    for (size_t i = 0; i < HELD; i++) {
        void *gone = calloc(1, bytes_of(i));
        CHECK(gone != NULL && is_zero(gone, bytes_of(i)));
        free(gone);
    }
    pthread_t thread;
    void *result;
    CHECK(pthread_create(&thread, NULL, in_early_thread, malloc(3000)) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result != NULL);
    free(result);
}

static void at_exit(void) {
    CHECK(is_filled(late, 300 * KIB, 3));
    free(late);
    late = malloc(200 * KIB);
    CHECK(late != NULL);
    fill(late, 200 * KIB, 4);
}

/* The program's, so it runs after at_exit. */
__attribute__((destructor(101))) static void after_main(void) {
    CHECK(late != NULL && is_filled(late, 200 * KIB, 4));
    free(late);
    for (size_t i = 0; i < HELD; i++) {
        CHECK(is_filled(early[i], bytes_of(i), i));
        early[i] = realloc(early[i], bytes_of(i) + 100);
        CHECK(early[i] != NULL && is_filled(early[i], bytes_of(i) / 8 * 8, i));
        free(early[i]);
    }
    CHECK(is_filled(earliest, 5000, 11));
    free(earliest);
    static const char done[] = "after_main 1\n";
    CHECK(write(STDOUT_FILENO, done, sizeof done - 1) == sizeof done - 1);
}

#ifndef STATIC
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
#endif

int main(int argc, char **argv) {
    CHECK(earliest != NULL && argc == 2);
#ifndef STATIC
    plugin_path = argv[1];
    open_and_close(0);
    run_threads(4, open_and_close);
#endif
    (void)argv;
    late = malloc(300 * KIB);
    CHECK(late != NULL);
    fill(late, 300 * KIB, 3);
    CHECK(atexit(at_exit) == 0);
    return 0;
}
