/* Opens a plugin, calls its function work() in four threads, closes it while they run, and prints whether its
 * object is still mapped at the end. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void (*work)(unsigned);
static pthread_barrier_t used, closed;

static void *run(void *argument) {
    work(5000);
    pthread_barrier_wait(&used);
    pthread_barrier_wait(&closed);
    /* The kernel reads the descriptor of the thread's last restartable sequence when it is preempted. */
    for (volatile unsigned long i = 0; i < 30000000; i++) {
        if (i % 10000 == 0) {
            sched_yield();
        }
    }
    return argument;
}

static int is_mapped(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        found |= strstr(line, "plugin.so") != NULL;
    }
    fclose(maps);
    return found;
}

int main(int argc, char **argv) {
    pthread_t threads[4];
    pthread_barrier_init(&used, NULL, 5);
    pthread_barrier_init(&closed, NULL, 5);
    void *plugin = dlopen(argv[argc - 1], RTLD_NOW);
    if (plugin == NULL) {
        puts(dlerror());
        return 1;
    }
    work = (void (*)(unsigned))dlsym(plugin, "work");
    for (int i = 0; i < 4; i++) {
        pthread_create(&threads[i], NULL, run, NULL);
    }
    pthread_barrier_wait(&used);
    dlclose(plugin);
    pthread_barrier_wait(&closed);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    usleep(300000); /* the helper's turn */
    printf("mapped: %d\n", is_mapped());
    return 0;
}
