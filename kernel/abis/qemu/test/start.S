/* From where the boot loader leaves the first CPU, and the wake-up call the second, to long mode; the entries
 * of exceptions; and the operations that may fault, as code that runs in user mode too. */
#include "layout.h"

#define MULTIBOOT_MAGIC 0x1badb002
/* Addresses to load at are in the header: the file need not be a 32-bit one. */
#define MULTIBOOT_FLAGS 0x00010000

#define CR0_PE_PG 0x80000001
/* Also write protection. */
#define CR0_ALL 0x80010001
#define CR4_PAE 0x20
#define CR4_PCIDE 0x20000
#define MSR_EFER 0xc0000080
/* System calls aside, long mode and no-execute. */
#define EFER_LME_NXE 0x900

	.section .boot, "ax"
	.code32
multiboot:
	.long MULTIBOOT_MAGIC
	.long MULTIBOOT_FLAGS
	.long -(MULTIBOOT_MAGIC + MULTIBOOT_FLAGS)
	.long multiboot
	.long multiboot
	.long image_end
	.long bss_end
	.long start

	.global start
start:
	cld
	mov $stacks + STACK_BYTES, %esp
	mov %ebx, multiboot_info

	/* PCIDE outside long mode: a gate for #GP alone is there to tell. */
	lgdt gdt_pointer
	ljmp $SELECTOR_CODE32, $1f
1:	mov $SELECTOR_DATA, %eax
	mov %eax, %ds
	mov %eax, %es
	mov %eax, %ss
	mov $early_fault, %eax
	mov %ax, early_idt + 13 * 8
	movw $SELECTOR_CODE32, early_idt + 13 * 8 + 2
	movw $0x8e00, early_idt + 13 * 8 + 4
	shr $16, %eax
	mov %ax, early_idt + 13 * 8 + 6
	lidt early_idt_pointer
	mov %cr4, %eax
	or $CR4_PCIDE, %eax
	mov %eax, %cr4
	jmp long_mode
early_fault:
	movl $1, pcide_faulted_early

long_mode:
	mov %cr4, %eax
	and $~CR4_PCIDE, %eax
	or $CR4_PAE, %eax
	mov %eax, %cr4

	/* The first 8 GiB as they are, by pages of 1 GiB: present, writable, accessed, dirty, large. */
	movl $boot_pdpt + 3, boot_pml4
	mov $boot_pdpt, %edi
	xor %ecx, %ecx
2:	mov %ecx, %eax
	shl $30, %eax
	or $0xe3, %eax
	mov %eax, (%edi, %ecx, 8)
	mov %ecx, %eax
	shr $2, %eax
	mov %eax, 4(%edi, %ecx, 8)
	inc %ecx
	cmp $8, %ecx
	jne 2b
	mov $boot_pml4, %eax
	mov %eax, %cr3
	mov $MSR_EFER, %ecx
	rdmsr
	or $EFER_LME_NXE, %eax
	wrmsr
	mov $CR0_ALL, %eax
	mov %eax, %cr0
	ljmp $SELECTOR_CODE, $3f

	.code64
3:	xor %edi, %edi
	call main
4:	hlt
	jmp 4b

/* The second CPU: copied to TRAMPOLINE, in real mode. Paging and long mode begin in one step. */
	.code16
	.global trampoline, trampoline_end
trampoline:
	cli
	xor %ax, %ax
	mov %ax, %ds
	lgdtl TRAMPOLINE + trampoline_gdt_pointer - trampoline
	mov $CR4_PAE, %eax
	mov %eax, %cr4
	mov $boot_pml4, %eax
	mov %eax, %cr3
	mov $MSR_EFER, %ecx
	rdmsr
	or $EFER_LME_NXE, %eax
	wrmsr
	mov $CR0_ALL, %eax
	mov %eax, %cr0
	ljmpl $SELECTOR_CODE, $second
trampoline_gdt_pointer:
	.word gdt_end - gdt - 1
	.long gdt
trampoline_end:

	.code64
second:
	mov $SELECTOR_DATA, %eax
	mov %eax, %ds
	mov %eax, %es
	mov %eax, %ss
	mov $stacks + 2 * STACK_BYTES, %esp
	mov $1, %edi
	call second_main
5:	hlt
	jmp 5b

/* attempt(operation, a, b, user): runs it in kernel or user mode, and returns the vector that ended it, 0 if
 * none. What it returned, the error code and CR2 are then in the CPU's own data. */
	.global attempt
attempt:
	push %rbx
	push %rbp
	push %r12
	push %r13
	push %r14
	push %r15
	mov %rsp, %gs:CPU_SAVED_STACK
	mov %rdi, %r8
	mov %rsi, %rdi
	mov %rdx, %rsi
	test %ecx, %ecx
	jnz 1f
	call *%r8
	int $VECTOR_DONE
1:	push $SELECTOR_USER_DATA
	push $0
	push $2
	push $SELECTOR_USER_CODE
	push %r8
	iretq

/* Reached with the vector and an error code on the stack. A fault that nobody waits for ends the test. */
fault:
	mov %rax, %gs:CPU_VALUE
	pop %gs:CPU_VECTOR
	pop %gs:CPU_ERROR
	mov %cr2, %rax
	mov %rax, %gs:CPU_ADDRESS
	mov (%rsp), %rdi
	mov %gs:CPU_SAVED_STACK, %rax
	test %rax, %rax
	jz unexpected_fault
	mov %rax, %rsp
	movq $0, %gs:CPU_SAVED_STACK
	push $2
	popf
	mov %gs:CPU_VECTOR, %rax
	cmp $VECTOR_DONE, %rax
	jne 1f
	xor %eax, %eax
1:	pop %r15
	pop %r14
	pop %r13
	pop %r12
	pop %rbp
	pop %rbx
	ret

	.macro entry vector, error=no
	.ifc \error, no
	push $0
	.endif
	push $\vector
	jmp fault
	.balign 16
	.endm

/* One for each vector below 32, 16 bytes apart, and the one of VECTOR_DONE. */
	.global fault_entries, done_entry
	.balign 16
fault_entries:
	.set vector, 0
	.rept 32
	.if vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21
	entry vector, yes
	.else
	entry vector
	.endif
	.set vector, vector + 1
	.endr
done_entry:
	push $0
	pushq $VECTOR_DONE
	jmp fault

/* Operations of kernel mode. Those with an AC access user pages, as a kernel's copies from and to its users
 * do. */
	.global kernel_read, kernel_read_ac, kernel_write, kernel_write_ac, kernel_execute
kernel_read_ac:
	stac
kernel_read:
	mov (%rdi), %rax
	ret
kernel_write_ac:
	stac
kernel_write:
	mov %rsi, (%rdi)
	ret
kernel_execute:
	jmp *%rdi

	.global set_cr0, set_cr3, set_cr4, do_invpcid
set_cr0:
	mov %rdi, %cr0
	ret
set_cr3:
	mov %rdi, %cr3
	ret
set_cr4:
	mov %rdi, %cr4
	ret
do_invpcid:
	invpcid (%rsi), %rdi
	ret

/* TLBINS (%rdi), its entry in RAX; in forms that are none; with a displacement, and with the base of FS. */
	.global tlbins, tlbins_register, tlbins_other_reg, tlbins_66, tlbins_f2, tlbins_f3, tlbins_lock
	.global tlbins_far, tlbins_fs
tlbins:
	mov %rsi, %rax
	.byte 0x0f, 0x0c, 0x07
	ret
tlbins_register:
	mov %rsi, %rax
	.byte 0x0f, 0x0c, 0xc7
	ret
tlbins_other_reg:
	mov %rsi, %rax
	.byte 0x0f, 0x0c, 0x0f
	ret
tlbins_66:
	mov %rsi, %rax
	.byte 0x66, 0x0f, 0x0c, 0x07
	ret
tlbins_f2:
	mov %rsi, %rax
	.byte 0xf2, 0x0f, 0x0c, 0x07
	ret
tlbins_f3:
	mov %rsi, %rax
	.byte 0xf3, 0x0f, 0x0c, 0x07
	ret
tlbins_lock:
	mov %rsi, %rax
	.byte 0xf0, 0x0f, 0x0c, 0x07
	ret
tlbins_far:
	mov %rsi, %rax
	mov %rdi, %r9
	sub $0x1000, %r9
	.byte 0x49, 0x0f, 0x0c, 0x81
	.long 0x1000
	ret
tlbins_fs:
	mov %rsi, %rax
	.byte 0x64, 0x0f, 0x0c, 0x07
	ret

/* Operations of user mode: copied to a page of its own. Nothing in them depends on where they are. */
	.global user_code, user_code_end, user_read, user_write, user_execute, user_invpcid, user_tlbins
user_code:
user_read:
	mov (%rdi), %rax
	int $VECTOR_DONE
user_write:
	mov %rsi, (%rdi)
	int $VECTOR_DONE
user_execute:
	jmp *%rdi
user_invpcid:
	invpcid (%rsi), %rdi
	int $VECTOR_DONE
user_tlbins:
	mov %rsi, %rax
	.byte 0x0f, 0x0c, 0x07
	int $VECTOR_DONE
user_code_end:

	.section .data
	.balign 8
	.global gdt, gdt_tss
gdt:
	.quad 0
	.quad 0x00af9b000000ffff
	.quad 0x00cf93000000ffff
	.quad 0x00cff3000000ffff
	.quad 0x00affb000000ffff
gdt_tss:
	.quad 0, 0, 0, 0
	.quad 0x00cf9b000000ffff
gdt_end:
	.global gdt_pointer
gdt_pointer:
	.word gdt_end - gdt - 1
	.quad gdt
early_idt_pointer:
	.word 14 * 8 - 1
	.long early_idt
	.global pcide_faulted_early, multiboot_info
	.balign 4
pcide_faulted_early:
	.long 0
multiboot_info:
	.long 0

	.section .bss
	.balign 4096
	.global boot_pml4
boot_pml4:
	.skip 4096
boot_pdpt:
	.skip 4096
early_idt:
	.skip 14 * 8
	.balign 16
stacks:
	.skip 2 * STACK_BYTES

	.section .note.GNU-stack, "", @progbits
