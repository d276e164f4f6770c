/* Forks while other threads allocate: malloc must work in the child, whatever locks those threads held. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 3, FORKS = 20, BLOCKS = 200, SIZE = 100000 };

static atomic_bool stop;

static int churn(void) {
    static _Thread_local char *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(SIZE);
        if (blocks[i] == NULL) {
            return 1;
        }
        memset(blocks[i], i, 64);
    }
    for (int i = BLOCKS - 1; i >= 0; i--) {
        if (blocks[i][63] != (char)i) {
            return 1;
        }
        free(blocks[i]);
    }
    return 0;
}

static void *churn_on(void *failed) {
    while (!stop) {
        if (churn() != 0) {
            *(atomic_bool *)failed = 1;
        }
    }
    return NULL;
}

static void *churn_once(void *failed) {
    *(atomic_bool *)failed = churn() != 0;
    return NULL;
}

/* In the child: the forking thread and a new one must both be able to allocate. */
static int child(void) {
    atomic_bool failed = 0;
    pthread_t thread;
    if (churn() != 0 || pthread_create(&thread, NULL, churn_once, &failed) != 0) {
        return 1;
    }
    pthread_join(thread, NULL);
    return failed;
}

int main(void) {
    atomic_bool failed = 0;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, churn_on, &failed) != 0) {
            return 1;
        }
    }
    int status = 0;
    for (int i = 0; i < FORKS && status == 0; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            alarm(20); /* a lock left held would otherwise hang the parent too */
            _exit(child());
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid) {
            status = -1;
        }
    }
    stop = 1;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("%d forks, status %d\n", FORKS, status);
    return status != 0 || failed;
}
