#include "profile/cfi.h"

#include <stddef.h>
#include <string.h>

/* A position in the tables. Reads past the end return zeros and set `bad`,
 * which stays set. */
struct reader {
    uintptr_t at;
    uintptr_t end;
    bool bad;
};

enum { UNSIGNED = false, SIGNED = true };

static void skip(struct reader *reader, uint64_t count) {
    if (reader->at > reader->end || reader->end - reader->at < count) {
        reader->bad = true;
    } else {
        reader->at += count;
    }
}

static uint64_t read_bytes(struct reader *reader, size_t count, bool is_signed) {
    uintptr_t from = reader->at;
    uint64_t value = 0;
    skip(reader, count);
    if (reader->bad) {
        return 0;
    }
    memcpy(&value, (const void *)from, count);
    size_t unused = 64 - 8 * count;
    return is_signed ? (uint64_t)((int64_t)(value << unused) >> unused) : value;
}

static unsigned cfi_read_byte(struct reader *reader) {
    return (unsigned)read_bytes(reader, 1, UNSIGNED);
}

static uint64_t read_leb(struct reader *reader, bool is_signed) {
    uint64_t value = 0;
    for (unsigned shift = 0;;) {
        uint64_t byte = cfi_read_byte(reader);
        value |= shift < 64 ? (byte & 0x7f) << shift : 0;
        shift += 7;
        if ((byte & 0x80) == 0 || reader->bad) {
            return is_signed && shift < 64 && (byte & 0x40) != 0 ? value | ~(uint64_t)0 << shift : value;
        }
    }
}

/* How a pointer is encoded (DW_EH_PE_*). The flag for indirect pointers is
 * ignored. Only pointers to routines have it, and these are not needed here. */
enum { FORMAT_LEB = 1, FORMAT_2_BYTES, FORMAT_4_BYTES, FORMAT_8_BYTES, FORMAT_SIGNED = 8 };
enum { RELATIVE_TO_NOTHING = 0, RELATIVE_TO_PLACE = 0x10, RELATIVE_TO_TABLES = 0x30, OMITTED = 0xff };

static uintptr_t read_pointer(struct reader *reader, unsigned encoding, uintptr_t tables) {
    uintptr_t place = reader->at;
    unsigned format = encoding & 7;
    unsigned base = encoding & 0x70;
    bool is_signed = (encoding & FORMAT_SIGNED) != 0;
    if (format > FORMAT_8_BYTES ||
        (base != RELATIVE_TO_NOTHING && base != RELATIVE_TO_PLACE && base != RELATIVE_TO_TABLES)) {
        reader->bad = true;
        return 0;
    }
    uintptr_t value = format == FORMAT_LEB
                          ? read_leb(reader, is_signed)
                          : read_bytes(reader, format == 0 ? 8 : (size_t)1 << (format - 1), is_signed);
    return value + (base == RELATIVE_TO_PLACE ? place : base == RELATIVE_TO_TABLES ? tables : 0);
}

/* How to find a register of the caller. */
enum rule_kind { SAME, UNDEFINED, AT_OFFSET, IS_OFFSET, AT_EXPRESSION, IS_EXPRESSION, IN_REGISTER };

struct rule {
    enum rule_kind kind;
    uint64_t value; /* an offset from the frame's address, a register, or the address of an expression */
};

struct rules {
    struct rule of[CFI_REGISTERS];
    unsigned frame_register;
    uint64_t frame_offset;
    uintptr_t frame_expression; /* 0: the register and offset define the frame's address */
};

/* A function's entry (FDE), together with the part that it shares with other
 * entries (CIE). */
struct cfi_entry {
    uintptr_t first;
    uintptr_t bytes;
    uint64_t code_factor;
    uint64_t data_factor;
    bool is_signal;
    bool is_augmented;
    unsigned encoding;      /* of addresses */
    struct reader common;   /* the instructions of the common part */
    struct reader specific; /* the instructions of the function */
};

/* Finds the body of an entry of .eh_frame. Returns false at the end of the
 * table. */
static bool open_entry(uintptr_t at, uintptr_t end, struct reader *body) {
    *body = (struct reader){.at = at, .end = end};
    uint64_t length = read_bytes(body, 4, UNSIGNED);
    if (length == 0xffffffff) {
        length = read_bytes(body, 8, UNSIGNED);
    }
    if (body->bad || length == 0 || body->end - body->at < length) {
        return false;
    }
    body->end = body->at + length;
    return true;
}

static bool read_common(const struct cfi_module *module, uintptr_t at, struct cfi_entry *entry) {
    struct reader reader;
    if (!open_entry(at, module->end, &reader) || read_bytes(&reader, 4, UNSIGNED) != 0) {
        return false;
    }
    unsigned version = cfi_read_byte(&reader);
    const char *augmentation = (const char *)reader.at;
    while (cfi_read_byte(&reader) != '\0') {
    }
    entry->code_factor = read_leb(&reader, UNSIGNED);
    entry->data_factor = read_leb(&reader, SIGNED);
    uint64_t return_column = version == 1 ? cfi_read_byte(&reader) : read_leb(&reader, UNSIGNED);
    if (reader.bad || (version != 1 && version != 3) || return_column != CFI_RETURN) {
        return false;
    }
    entry->common = reader;
    if (*augmentation == '\0') {
        return true;
    }
    entry->is_augmented = *augmentation++ == 'z';
    uint64_t length = read_leb(&reader, UNSIGNED);
    entry->common = reader;
    skip(&entry->common, length);
    for (; *augmentation != '\0'; augmentation++) {
        if (*augmentation == 'R') {
            entry->encoding = cfi_read_byte(&reader);
        } else if (*augmentation == 'L') {
            cfi_read_byte(&reader);
        } else if (*augmentation == 'P') {
            read_pointer(&reader, cfi_read_byte(&reader) & 0x7f, module->tables);
        } else if (*augmentation == 'S') {
            entry->is_signal = true;
        } else if (*augmentation != 'B') { /* the key that signs return addresses */
            return false;
        }
    }
    return entry->is_augmented && !reader.bad && !entry->common.bad;
}

static bool read_entry(const struct cfi_module *module, uintptr_t at, struct cfi_entry *entry) {
    struct reader reader;
    *entry = (struct cfi_entry){0};
    if (at < module->start || !open_entry(at, module->end, &reader)) {
        return false;
    }
    uintptr_t place = reader.at;
    uint64_t back = read_bytes(&reader, 4, UNSIGNED);
    if (back == 0 || back > place - module->start || !read_common(module, place - back, entry)) {
        return false;
    }
    entry->first = read_pointer(&reader, entry->encoding, module->tables);
    entry->bytes = read_pointer(&reader, entry->encoding & 0x0f, module->tables);
    if (entry->is_augmented) {
        skip(&reader, read_leb(&reader, UNSIGNED));
    }
    entry->specific = reader;
    return !reader.bad;
}

/* Returns a number of the table that the linker sorted. Each number is an
 * address, stored relative to the tables. */
static uintptr_t sorted_address(const struct cfi_module *module, uintptr_t table, uint64_t number) {
    int32_t offset;
    memcpy(&offset, (const void *)(table + number * sizeof offset), sizeof offset);
    return module->tables + (uintptr_t)(intptr_t)offset;
}

/* Finds the entry of the function at an address. The sorted table has pairs:
 * the address at which a function begins, and the address of its entry. */
static bool find_entry(const struct cfi_module *module, uintptr_t address, struct cfi_entry *entry) {
    struct reader reader = {.at = module->tables, .end = module->end};
    if (module->tables < module->start || cfi_read_byte(&reader) != 1) {
        return false;
    }
    unsigned frame_encoding = cfi_read_byte(&reader);
    unsigned count_encoding = cfi_read_byte(&reader);
    unsigned table_encoding = cfi_read_byte(&reader);
    read_pointer(&reader, frame_encoding, module->tables);
    uint64_t count = read_pointer(&reader, count_encoding, module->tables);
    if (reader.bad || table_encoding != (RELATIVE_TO_TABLES | FORMAT_SIGNED | FORMAT_4_BYTES) ||
        count_encoding == OMITTED || count == 0 || count > (module->end - reader.at) / 8) {
        return false;
    }
    uint64_t low = 0;
    uint64_t high = count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        *(sorted_address(module, reader.at, 2 * middle) <= address ? &low : &high) = middle;
    }
    return read_entry(module, sorted_address(module, reader.at, 2 * low + 1), entry) &&
           address - entry->first < entry->bytes;
}

/* What an instruction (DW_CFA_*) does with its two operands, and how they are
 * encoded. */
enum { UNKNOWN, NOTHING, ADVANCE, RESTORE, REMEMBER, RECALL };
enum { SET_FRAME = RECALL + 1, SET_FRAME_REGISTER, SET_FRAME_OFFSET, SET_FRAME_EXPRESSION };
enum { SET_RULE = SET_FRAME_EXPRESSION + 1 /* the kind of rule is added */ };
enum operand {
    NO_OPERAND,
    BYTES_1,
    BYTES_2,
    BYTES_4,
    LOW_BITS,
    PLAIN_NUMBER,
    OFFSET,
    SIGNED_OFFSET,
    EXPRESSION
};

static const struct instruction {
    unsigned effect;
    enum operand first;
    enum operand second;
} instructions[] = {
    [0x00] = {NOTHING, NO_OPERAND, NO_OPERAND},
    [0x02] = {ADVANCE, BYTES_1, NO_OPERAND},
    [0x03] = {ADVANCE, BYTES_2, NO_OPERAND},
    [0x04] = {ADVANCE, BYTES_4, NO_OPERAND},
    [0x05] = {SET_RULE + AT_OFFSET, PLAIN_NUMBER, OFFSET},
    [0x06] = {RESTORE, PLAIN_NUMBER, NO_OPERAND},
    [0x07] = {SET_RULE + UNDEFINED, PLAIN_NUMBER, NO_OPERAND},
    [0x08] = {SET_RULE + SAME, PLAIN_NUMBER, NO_OPERAND},
    [0x09] = {SET_RULE + IN_REGISTER, PLAIN_NUMBER, PLAIN_NUMBER},
    [0x0a] = {REMEMBER, NO_OPERAND, NO_OPERAND},
    [0x0b] = {RECALL, NO_OPERAND, NO_OPERAND},
    [0x0c] = {SET_FRAME, PLAIN_NUMBER, PLAIN_NUMBER},
    [0x0d] = {SET_FRAME_REGISTER, PLAIN_NUMBER, NO_OPERAND},
    [0x0e] = {SET_FRAME_OFFSET, PLAIN_NUMBER, NO_OPERAND},
    [0x0f] = {SET_FRAME_EXPRESSION, EXPRESSION, NO_OPERAND},
    [0x10] = {SET_RULE + AT_EXPRESSION, PLAIN_NUMBER, EXPRESSION},
    [0x11] = {SET_RULE + AT_OFFSET, PLAIN_NUMBER, SIGNED_OFFSET},
    [0x12] = {SET_FRAME, PLAIN_NUMBER, SIGNED_OFFSET},
    [0x13] = {SET_FRAME_OFFSET, SIGNED_OFFSET, NO_OPERAND},
    [0x14] = {SET_RULE + IS_OFFSET, PLAIN_NUMBER, OFFSET},
    [0x15] = {SET_RULE + IS_OFFSET, PLAIN_NUMBER, SIGNED_OFFSET},
    [0x16] = {SET_RULE + IS_EXPRESSION, PLAIN_NUMBER, EXPRESSION},
    [0x2d] = {NOTHING, NO_OPERAND, NO_OPERAND},   /* AARCH64_negate_ra_state */
    [0x2e] = {NOTHING, PLAIN_NUMBER, NO_OPERAND}, /* GNU_args_size */
    /* The instructions whose code is two bits. Their first operand is the other
     * six bits. */
    [0x40] = {ADVANCE, LOW_BITS, NO_OPERAND},
    [0x41] = {SET_RULE + AT_OFFSET, LOW_BITS, OFFSET},
    [0x42] = {RESTORE, LOW_BITS, NO_OPERAND},
};

static uint64_t read_operand(struct reader *reader, enum operand operand, unsigned code,
                             const struct cfi_entry *entry) {
    uintptr_t place = reader->at;
    switch (operand) {
    case NO_OPERAND:
        break;
    case BYTES_1:
    case BYTES_2:
    case BYTES_4:
        return read_bytes(reader, (size_t)1 << (operand - BYTES_1), UNSIGNED);
    case LOW_BITS:
        return code & 0x3f;
    case PLAIN_NUMBER:
        return read_leb(reader, UNSIGNED);
    case OFFSET:
    case SIGNED_OFFSET:
        return read_leb(reader, operand == SIGNED_OFFSET) * entry->data_factor;
    case EXPRESSION: /* skips the length and the bytes */
        skip(reader, read_leb(reader, UNSIGNED));
        return place;
    }
    return 0;
}

/* Compilers nest remembered states once. The limit is low, since the thread's
 * stack may be small. */
#define MAX_REMEMBERED 4

/* Runs instructions until they describe what follows the address. `initial`
 * holds the rules that the common part sets, which an instruction may restore.
 * Returns false if an instruction is not known. */
static bool cfi_run(const struct cfi_entry *entry, struct reader reader, uintptr_t address,
                    const struct rules *initial, struct rules *rules) {
    struct rules remembered[MAX_REMEMBERED];
    size_t depth = 0;
    uintptr_t location = entry->first;
    while (reader.at < reader.end && !reader.bad) {
        unsigned code = cfi_read_byte(&reader);
        const struct instruction *instruction = &instructions[code < 0x40 ? code : 0x3f + (code >> 6)];
        uint64_t first = read_operand(&reader, instruction->first, code, entry);
        uint64_t second = read_operand(&reader, instruction->second, code, entry);
        switch (instruction->effect) {
        case UNKNOWN:
            return false;
        case NOTHING:
            break;
        case ADVANCE:
            location += first * entry->code_factor;
            break;
        case RESTORE:
            if (first < CFI_REGISTERS) {
                rules->of[first] = initial->of[first];
            }
            break;
        case REMEMBER:
            if (depth == MAX_REMEMBERED) {
                return false;
            }
            remembered[depth++] = *rules;
            break;
        case RECALL:
            if (depth == 0) {
                return false;
            }
            *rules = remembered[--depth];
            break;
        case SET_FRAME:
        case SET_FRAME_REGISTER:
            rules->frame_register = (unsigned)first;
            rules->frame_offset = instruction->effect == SET_FRAME ? second : rules->frame_offset;
            rules->frame_expression = 0;
            break;
        case SET_FRAME_OFFSET:
            rules->frame_offset = first;
            break;
        case SET_FRAME_EXPRESSION:
            rules->frame_expression = first;
            break;
        default:
            if (first < CFI_REGISTERS) {
                rules->of[first] = (struct rule){instruction->effect - SET_RULE, second};
            }
        }
        if (location > address) {
            return true;
        }
    }
    return !reader.bad;
}

/* The frame whose caller is to be found. */
struct frame {
    const struct cfi_module *module;
    const struct cfi_registers *registers;
    cfi_load load;
    void *context;
    uintptr_t address; /* DWARF's "canonical frame address" */
};

#define MAX_OPERANDS 16

/* Evaluates an expression. Knows only the operations that linkers and C
 * libraries use, in signal frames and in calls through tables. `start` is the
 * first operand on the expression's stack; NULL: the stack is empty. */
static bool evaluate(const struct frame *frame, uintptr_t expression, const uintptr_t *start,
                     uintptr_t *value) {
    struct reader reader = {.at = expression, .end = frame->module->end};
    uint64_t length = read_leb(&reader, UNSIGNED);
    if (reader.bad || reader.end - reader.at < length) {
        return false;
    }
    reader.end = reader.at + length;
    /* Two zeros are below the lowest operand. An operation that lacks operands
     * takes these zeros, and the expression fails. */
    uintptr_t operands[MAX_OPERANDS + 2] = {0, 0, start == NULL ? 0 : *start};
    size_t top = start == NULL ? 2 : 3;
    while (reader.at < reader.end) {
        unsigned code = cfi_read_byte(&reader);
        uintptr_t *last = &operands[top - 1];
        if (code >= 0x30 && code <= 0x4f) { /* lit0 to lit31 */
            operands[top++] = code - 0x30;
        } else if (code >= 0x70 && code <= 0x70 + CFI_LAST) { /* breg0 and so on */
            operands[top++] = frame->registers->of[code - 0x70] + read_leb(&reader, SIGNED);
        } else if (code >= 0x08 && code <= 0x0f) { /* const1u, const1s, const2u to const8s */
            operands[top++] = read_bytes(&reader, (size_t)1 << (code - 0x08) / 2, code % 2 != 0);
        } else if (code == 0x10 || code == 0x11) { /* constu, consts */
            operands[top++] = read_leb(&reader, code == 0x11);
        } else if (code == 0x23) { /* plus_uconst */
            *last += read_leb(&reader, UNSIGNED);
        } else if (code == 0x06) { /* deref */
            if (!frame->load(frame->context, *last, last)) {
                return false;
            }
        } else if (code == 0x1a || code == 0x1c || code == 0x22 || code == 0x24 || code == 0x2a) {
            last[-1] = code == 0x1a   ? last[-1] & last[0]                      /* and */
                       : code == 0x1c ? last[-1] - last[0]                      /* minus */
                       : code == 0x22 ? last[-1] + last[0]                      /* plus */
                       : code == 0x2a ? (intptr_t)last[-1] >= (intptr_t)last[0] /* ge */
                       : last[0] < 64 ? last[-1] << last[0]                     /* shl */
                                      : 0;
            top--;
        } else {
            return false;
        }
        if (reader.bad || top < 3 || top == MAX_OPERANDS + 2) {
            return false;
        }
    }
    *value = operands[top - 1];
    return top >= 3;
}

static bool find_register(const struct frame *frame, const struct rule *rule, unsigned number,
                          uintptr_t *value) {
    /* If the stack pointer has no rule, it is the frame's address by
     * definition. */
    uintptr_t found = number == CFI_STACK ? frame->address : frame->registers->of[number];
    switch (rule->kind) {
    case SAME:
    case UNDEFINED:
        break;
    case AT_OFFSET:
    case IS_OFFSET:
        found = frame->address + rule->value;
        break;
    case AT_EXPRESSION:
    case IS_EXPRESSION:
        if (!evaluate(frame, rule->value, &frame->address, &found)) {
            return false;
        }
        break;
    case IN_REGISTER:
        if (rule->value >= CFI_REGISTERS) {
            return false;
        }
        found = frame->registers->of[rule->value];
    }
    *value = found;
    return (rule->kind != AT_OFFSET && rule->kind != AT_EXPRESSION) ||
           frame->load(frame->context, found, value);
}

enum cfi_step cfi_step(const struct cfi_module *module, struct cfi_registers *registers, cfi_load load,
                       void *context) {
    /* If a call is the last instruction of its function, its return address is
     * where the next function begins. */
    uintptr_t address = registers->of[CFI_PC] - (registers->in_signal ? 0 : 1);
    struct cfi_entry entry;
    struct rules initial = {0};
    if (!find_entry(module, address, &entry) ||
        !cfi_run(&entry, entry.common, UINTPTR_MAX, &initial, &initial)) {
        return CFI_UNKNOWN;
    }
    struct rules rules = initial;
    if (!cfi_run(&entry, entry.specific, address, &initial, &rules)) {
        return CFI_UNKNOWN;
    }
    enum rule_kind back = rules.of[CFI_RETURN].kind;
    if (back == UNDEFINED) {
        return CFI_OUTERMOST;
    }
    /* On aarch64 a function that calls no other keeps the return address in its
     * register. */
    if (back == SAME && CFI_RETURN == CFI_PC) {
        return CFI_UNKNOWN;
    }
    struct frame frame = {module, registers, load, context, 0};
    struct cfi_registers caller = {.in_signal = entry.is_signal};
    if (rules.frame_expression == 0 && rules.frame_register < CFI_REGISTERS) {
        if (rules.frame_register == CFI_STACK && registers->stack_is_least) {
            return CFI_UNKNOWN;
        }
        frame.address = registers->of[rules.frame_register] + rules.frame_offset;
    } else if (rules.frame_expression == 0 ||
               !evaluate(&frame, rules.frame_expression, NULL, &frame.address)) {
        return CFI_UNKNOWN;
    }
    for (unsigned number = 0; number < CFI_REGISTERS; number++) {
        if (!find_register(&frame, &rules.of[number], number, &caller.of[number])) {
            return CFI_UNKNOWN;
        }
    }
    caller.of[CFI_PC] = caller.of[CFI_RETURN];
    *registers = caller;
    return CFI_STEPPED;
}
