#include "machine.h"

enum { SERIAL = 0x3f8, SERIAL_STATUS = 5, SERIAL_EMPTY = 0x20, EXIT_PORT = 0xf4 };
enum { CPUS = 2, VECTORS = VECTOR_DONE + 1, EXCEPTIONS = 32, ENTRY_BYTES = 16 };
enum { MSR_APIC_BASE = 0x1b, INDEX_BITS = 9, ENTRIES = 512 };
/* At the end of the region; the checks use pages before it. */
enum { USER_CODE_PAGE = ENTRIES - 1 };

#define MSR_GS_BASE  0xc0000101U
#define GATE_PRESENT (0x8eUL << 40)
#define GATE_USER    (0x60UL << 40)
#define APIC_COMMAND 0x300
#define APIC_TARGET  0x310
#define APIC_ENABLE  0xf0

struct multiboot_info {
    uint32_t flags, lower, upper, boot_device, command_line;
};

struct tss {
    uint32_t reserved;
    uint32_t stack0[2];
    uint32_t rest[23];
};

struct table_pointer {
    uint16_t limit;
    uint64_t base;
} __attribute__((packed));

extern uint64_t gdt[], gdt_tss[], boot_pml4[];
extern const struct table_pointer gdt_pointer;
extern const char fault_entries[], done_entry[], user_code[], user_code_end[], trampoline[], trampoline_end[];
extern uint32_t multiboot_info;

static struct cpu cpus[CPUS];
static struct tss tasks[CPUS];
static char fault_stacks[CPUS][STACK_BYTES] __attribute__((aligned(16)));
static uint64_t idt[VECTORS][2];
static uint64_t tables[HIERARCHIES][4][ENTRIES] __attribute__((aligned(4096)));
static uint64_t frames[FRAMES][ENTRIES] __attribute__((aligned(4096)));
static uint64_t user_frame[ENTRIES] __attribute__((aligned(4096)));

static void (*volatile next_job)(void);
static volatile bool second_is_up;

void main(void);
void second_main(void);
_Noreturn void unexpected_fault(uint64_t where);

static inline void out8(uint16_t port, uint8_t value) {
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline void out32(uint16_t port, uint32_t value) {
    __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port));
}

static inline uint8_t in8(uint16_t port) {
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

void print(const char *text) {
    for (; *text; text++) {
        while (!(in8(SERIAL + SERIAL_STATUS) & SERIAL_EMPTY))
            ;
        out8(SERIAL, (uint8_t)*text);
    }
}

void print_number(uint64_t number) {
    char digits[21];
    char *digit = &digits[sizeof digits - 1];
    *digit = '\0';
    do {
        *--digit = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    print(digit);
}

/* The emulator exits with twice the value plus one. */
_Noreturn void leave(bool well) {
    out32(EXIT_PORT, well ? 16 : 17);
    for (;;)
        __asm__ volatile("hlt");
}

uint64_t read_msr(uint32_t number) {
    uint32_t low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(number));
    return (uint64_t)high << 32 | low;
}

void write_msr(uint32_t number, uint64_t value) {
    __asm__ volatile("wrmsr" : : "a"((uint32_t)value), "d"((uint32_t)(value >> 32)), "c"(number));
}

struct cpu *this_cpu(void) {
    return (struct cpu *)read_msr(MSR_GS_BASE);
}

_Noreturn void unexpected_fault(uint64_t where) {
    const struct cpu *cpu = this_cpu();
    print("FAILED: unexpected vector ");
    print_number(cpu->vector);
    print(", error code ");
    print_number(cpu->error);
    print(", at ");
    print_number(where);
    print(", CR2 ");
    print_number(cpu->address);
    print("\n");
    leave(false);
}

bool told(const char *word) {
    const struct multiboot_info *info = (const struct multiboot_info *)(uintptr_t)multiboot_info;
    const char *line = (const char *)(uintptr_t)info->command_line;
    for (; *line; line++) {
        size_t i = 0;
        while (word[i] && line[i] == word[i])
            i++;
        if (!word[i])
            return true;
    }
    return false;
}

static void set_gate(unsigned vector, uintptr_t entry, uint64_t flags) {
    idt[vector][0] = (entry & 0xffff) | SELECTOR_CODE << 16 | flags | (entry & 0xffff0000) << 32;
    idt[vector][1] = entry >> 32;
}

static void prepare_cpu(unsigned number) {
    struct tss *task = &tasks[number];
    uintptr_t base = (uintptr_t)task, stack = (uintptr_t)fault_stacks[number + 1];
    task->stack0[0] = (uint32_t)stack;
    gdt_tss[2 * number] =
        (sizeof *task - 1) | (base & 0xffffff) << 16 | 0x89UL << 40 | (base >> 24 & 0xff) << 56;
    gdt_tss[2 * number + 1] = base >> 32;
    const struct table_pointer idt_pointer = {sizeof idt - 1, (uint64_t)idt};
    __asm__ volatile("lgdt %0" : : "m"(gdt_pointer));
    __asm__ volatile("lidt %0" : : "m"(idt_pointer));
    __asm__ volatile("ltr %w0" : : "r"(SELECTOR_TSS + 16 * number));
    write_msr(MSR_GS_BASE, (uintptr_t)&cpus[number]);
    write_cr4(read_cr4() | CR4_SMEP | CR4_SMAP);
}

static void copy(void *to, const char *from, const char *end) {
    for (char *byte = to; from != end;)
        *byte++ = *from++;
}

static void prepare_tables(void) {
    for (unsigned i = 0; i < HIERARCHIES; i++) {
        uint64_t(*levels)[ENTRIES] = tables[i];
        for (unsigned entry = 0; entry < ENTRIES; entry++)
            levels[0][entry] = boot_pml4[entry];
        unsigned shift = 12 + 3 * INDEX_BITS;
        for (unsigned level = 0; level < 3; level++, shift -= INDEX_BITS)
            levels[level][REGION >> shift & (ENTRIES - 1)] =
                (uintptr_t)levels[level + 1] | PRESENT | WRITABLE | USER;
        levels[3][USER_CODE_PAGE] = (uintptr_t)user_frame | PRESENT | USER | ACCESSED;
    }
}

uint64_t *entry_of(enum hierarchy hierarchy, unsigned page) {
    return &tables[hierarchy][3][page];
}

uint64_t root_of(enum hierarchy hierarchy) {
    return (uintptr_t)tables[hierarchy][0];
}

uint64_t *frame_of(unsigned number) {
    return frames[number];
}

operation *in_user_page(operation *what) {
    return (operation *)(address_of(USER_CODE_PAGE) + ((uintptr_t)what - (uintptr_t)user_code));
}

static void write_apic(unsigned offset, uint32_t value) {
    uint64_t base = read_msr(MSR_APIC_BASE) & ~(PAGE - 1);
    *(volatile uint32_t *)(base + offset) = value;
}

static void wake_second(void) {
    copy((void *)TRAMPOLINE, trampoline, trampoline_end);
    write_apic(APIC_ENABLE, 0x1ff);
    write_apic(APIC_TARGET, 1U << 24);
    write_apic(APIC_COMMAND, 0x4500);
    write_apic(APIC_TARGET, 1U << 24);
    write_apic(APIC_COMMAND, 0x4600 | TRAMPOLINE >> 12);
    while (!second_is_up)
        __asm__ volatile("pause");
}

void second_main(void) {
    prepare_cpu(1);
    second_is_up = true;
    for (;;) {
        void (*job)(void) = next_job;
        if (job) {
            job();
            next_job = NULL;
        }
        __asm__ volatile("pause");
    }
}

void give_job(void (*job)(void)) {
    next_job = job;
}

void wait_for_job(void) {
    while (next_job)
        __asm__ volatile("pause");
}

void run_checks(void);

void main(void) {
    for (unsigned vector = 0; vector < EXCEPTIONS; vector++)
        set_gate(vector, (uintptr_t)fault_entries + vector * ENTRY_BYTES, GATE_PRESENT);
    set_gate(VECTOR_DONE, (uintptr_t)done_entry, GATE_PRESENT | GATE_USER);
    copy(user_frame, user_code, user_code_end);
    prepare_tables();
    prepare_cpu(0);
    write_cr3(root_of(PRIMARY));
    wake_second();
    run_checks();
}
