/*
 * vfork. The child runs on its parent's thread-local storage, where the kernel keeps no CPU number for it:
 * the one it finds is the parent's, on which another thread may run by now. So the child makes it the number
 * of a cache that is always closed, and goes to the heap, by its locks.
 *
 * The parent resumes where the kernel has written its number anew; where it has not, what the child made of
 * it is undone. The exchange is one instruction, so that it cannot part.
 *
 * The child returns first, and its calls overwrite the stack below: all that the parent needs is in
 * registers.
 */
#include "api/vfork.h"

#include "api/state.h"
#include "cache/cpu_cache.h"
#include "os/syscall.h"

/* Named by the instructions below. */
struct vfork_number {
    ptrdiff_t number; /* from the thread pointer to the CPU number; 0 except in CACHE_RSEQ */
    uint32_t caches;  /* what the child adds to it */
} calm_vfork __attribute__((used, visibility("hidden")));

void vfork_prepare(void) {
    calm_vfork.number = cpu_cache_is_rseq(&calm_caches) ? calm_caches.rseq.cpu_number : 0;
    calm_vfork.caches = calm_caches.count;
}

bool vfork_is_child(void) {
    return cpu_cache_is_rseq(&calm_caches) && cpu_cache_number(&calm_caches) >= calm_caches.count;
}

#if !defined(CALM_WITHOUT_MALLOC) && defined(__x86_64__)

/* In the child, too: in its frame there is nothing of the parent's. */
__attribute__((used, visibility("hidden"))) int vfork_result(long result) {
    return (int)libc_result(result);
}

/* rdi: the return address; rdx: where the number is, 0 without; ecx: how many there are. */
__asm__(".pushsection .text\n\t"
        ".globl vfork\n\t"
        ".type vfork, @function\n\t"
        ".balign 16\n"
        "vfork:\n\t"
        ".cfi_startproc\n\t"
        "movq calm_vfork+0(%rip), %rdx\n\t"
        "testq %rdx, %rdx\n\t"
        "jz 1f\n\t"
        "addq %fs:0, %rdx\n"
        "1:\n\t"
        "popq %rdi\n\t"
        ".cfi_adjust_cfa_offset -8\n\t"
        ".cfi_register %rip, %rdi\n\t"
        "movl $58, %eax\n\t" /* SYS_vfork */
        "syscall\n\t"
        "pushq %rdi\n\t"
        ".cfi_adjust_cfa_offset 8\n\t"
        ".cfi_offset %rip, -8\n\t"
        "testq %rdx, %rdx\n\t"
        "jz 3f\n\t"
        "movl calm_vfork+8(%rip), %ecx\n\t"
        "testq %rax, %rax\n\t"
        "jnz 2f\n\t"
        "cmpl %ecx, (%rdx)\n\t"
        "jae 5f\n\t" /* a child's child */
        "addl %ecx, (%rdx)\n"
        "5:\n\t"
        "ret\n"
        "2:\n\t"
        "movq %rax, %r8\n\t"
        "movl (%rdx), %eax\n\t"
        "movl %eax, %esi\n\t"
        "subl %ecx, %esi\n\t"
        "jb 6f\n\t"
        "cmpxchgl %esi, (%rdx)\n"
        "6:\n\t"
        "movq %r8, %rax\n"
        "3:\n\t"
        "movq %rax, %rdi\n\t"
        "jmp vfork_result\n\t"
        ".cfi_endproc\n\t"
        ".size vfork, .-vfork\n\t"
        ".popsection");

#endif
