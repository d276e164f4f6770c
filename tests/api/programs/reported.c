/* Programs whose reports and profiles are read: families of processes, and ends under limits. */
#include "api.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Frees so much memory, and has it purged. */
static void churn(size_t bytes) {
    void *volatile block = malloc(bytes);
    CHECK(block != NULL);
    memset(block, 1, bytes);
    free(block);
    malloc_trim(0);
}

static pid_t fork_one(void) {
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    return child;
}

static void wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Children and a grandchild that do less than their parent did. */
static int family(int children) {
    for (int i = 0; i < 20; i++) {
        churn(8 * MIB);
    }
    say("parent", (uint64_t)getpid());
    for (int i = 0; i < children; i++) {
        pid_t child = fork_one();
        if (child == 0) {
            churn(3 * MIB);
            pid_t grandchild = fork_one();
            if (grandchild != 0) {
                wait_for(grandchild);
            } else {
                churn(1 * MIB);
            }
            return 0;
        }
        wait_for(child);
    }
    return 0;
}

/* From the filter on the kernel may not be asked for numbers. */
static int filtered(void) {
    say("parent", (uint64_t)getpid());
    deny_call(SYS_getpid, EPERM);
    pid_t child = fork_one();
    if (child != 0) {
        wait_for(child);
    }
    return 0;
}

static volatile sig_atomic_t caught;

static void note(int number) {
    caught = number;
}

static bool is_pending(int number) {
    sigset_t pending;
    CHECK(sigpending(&pending) == 0);
    return sigismember(&pending, number) == 1;
}

/* What the program does with a signal that the library's own writes raise: the same after them as before. */
static int limited(const char *how, int number) {
    sigset_t one;
    CHECK(sigemptyset(&one) == 0 && sigaddset(&one, number) == 0);
    bool blocks = strcmp(how, "blocked") == 0;
    bool pends = strcmp(how, "pending") == 0;
    if (strcmp(how, "ignored") == 0) {
        CHECK(signal(number, SIG_IGN) != SIG_ERR);
    } else if (strcmp(how, "handled") == 0) {
        CHECK(signal(number, note) != SIG_ERR);
    } else if (blocks || pends) {
        CHECK(sigprocmask(SIG_BLOCK, &one, NULL) == 0);
    }
    if (pends) {
        CHECK(raise(number) == 0);
    }
    malloc_stats(); /* to stderr */
    CHECK(caught == 0);
    CHECK(is_pending(number) == pends);
    sigset_t mask;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &mask) == 0);
    CHECK(sigismember(&mask, number) == (blocks || pends));
    printf("the program's output\n"); /* still in its buffer */
    return 7;
}

int main(int count, char **arguments) {
    const char *which = count > 1 ? arguments[1] : "";
    if (strcmp(which, "family") == 0 && count > 2) {
        return family(atoi(arguments[2]));
    }
    if (strcmp(which, "filtered") == 0) {
        return filtered();
    }
    if (strcmp(which, "limited") == 0 && count > 3) {
        return limited(arguments[2], strcmp(arguments[3], "SIGPIPE") == 0 ? SIGPIPE : SIGXFSZ);
    }
    fprintf(stderr, "usage: reported family CHILDREN|filtered|limited HOW SIGNAL\n");
    return 2;
}
