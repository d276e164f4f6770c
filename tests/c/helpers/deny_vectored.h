/* Kernels and sandboxes that refuse process_madvise(2). */
#ifndef CALM_TESTS_DENY_VECTORED_H
#define CALM_TESTS_DENY_VECTORED_H

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "check.h"

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

/* A filter of system calls, for the calling thread and its children from now on. */
static inline void add_filter(const struct sock_filter *filter, size_t count) {
    struct sock_fprog program = {.len = (unsigned short)count, .filter = (struct sock_filter *)filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* process_madvise fails with `error`, or only on the caller's own PIDFD_SELF if that is wanted. */
static inline void deny_vectored(unsigned error, bool only_pidfd_self) {
    const struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_madvise, 0, 3),
        /* The low half of the first argument is below zero: no descriptor. */
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, only_pidfd_self ? 0x80000000U : 0U, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    add_filter(filter, sizeof filter / sizeof filter[0]);
}

#endif
