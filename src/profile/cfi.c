#include "profile/cfi.h"

#include <stddef.h>
#include <string.h>

/* A place in the tables. What would be read past the end is zero, and `bad` stays set. */
struct reader {
    uintptr_t at;
    uintptr_t end;
    bool bad;
};

static uint64_t read_bytes(struct reader *reader, size_t count) {
    uint64_t value = 0;
    if (reader->at > reader->end || reader->end - reader->at < count) {
        reader->bad = true;
        return 0;
    }
    memcpy(&value, (const void *)reader->at, count);
    reader->at += count;
    return value;
}

static uint64_t read_uleb(struct reader *reader) {
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
        uint64_t byte = read_bytes(reader, 1);
        value |= shift < 64 ? (byte & 0x7f) << shift : 0;
        if ((byte & 0x80) == 0 || reader->bad) {
            return value;
        }
    }
}

static int64_t read_sleb(struct reader *reader) {
    uint64_t value = 0;
    for (unsigned shift = 0;;) {
        uint64_t byte = read_bytes(reader, 1);
        value |= shift < 64 ? (byte & 0x7f) << shift : 0;
        shift += 7;
        if ((byte & 0x80) == 0 || reader->bad) {
            return (int64_t)(shift < 64 && (byte & 0x40) != 0 ? value | ~(uint64_t)0 << shift : value);
        }
    }
}

static void skip(struct reader *reader, uint64_t count) {
    if (reader->at > reader->end || reader->end - reader->at < count) {
        reader->bad = true;
    } else {
        reader->at += count;
    }
}

/* DW_EH_PE_*: how a pointer is written. Indirect ones are only of routines that are not needed here. */
enum {
    FORM_ABSOLUTE = 0,
    FORM_ULEB = 1,
    FORM_U2,
    FORM_U4,
    FORM_U8,
    FORM_SLEB = 9,
    FORM_S2,
    FORM_S4,
    FORM_S8
};
enum { RELATIVE_TO_NOTHING = 0, RELATIVE_TO_PLACE = 0x10, RELATIVE_TO_TABLES = 0x30, FORM_OMITTED = 0xff };

static uintptr_t read_pointer(struct reader *reader, unsigned encoding, uintptr_t tables) {
    uintptr_t place = reader->at;
    uintptr_t value = 0;
    switch (encoding & 0x0f) {
    case FORM_ABSOLUTE:
    case FORM_U8:
    case FORM_S8:
        value = read_bytes(reader, 8);
        break;
    case FORM_ULEB:
        value = read_uleb(reader);
        break;
    case FORM_U2:
        value = read_bytes(reader, 2);
        break;
    case FORM_U4:
        value = read_bytes(reader, 4);
        break;
    case FORM_SLEB:
        value = (uintptr_t)read_sleb(reader);
        break;
    case FORM_S2:
        value = (uintptr_t)(intptr_t)(int16_t)read_bytes(reader, 2);
        break;
    case FORM_S4:
        value = (uintptr_t)(intptr_t)(int32_t)read_bytes(reader, 4);
        break;
    default:
        reader->bad = true;
    }
    switch (encoding & 0x70) {
    case RELATIVE_TO_NOTHING:
        return value;
    case RELATIVE_TO_PLACE:
        return value + place;
    case RELATIVE_TO_TABLES:
        return value + tables;
    default:
        reader->bad = true;
        return 0;
    }
}

/* How a register of the caller is found. */
enum rule_kind {
    RULE_SAME,
    RULE_UNDEFINED,
    RULE_AT_OFFSET,
    RULE_IS_OFFSET,
    RULE_AT_EXPRESSION,
    RULE_IS_EXPRESSION,
    RULE_REGISTER
};

struct rule {
    enum rule_kind kind;
    int64_t value; /* an offset from the frame's address, a register, or where an expression lies */
};

struct rules {
    struct rule of[CFI_REGISTERS];
    unsigned frame_register;
    int64_t frame_offset;
    uintptr_t frame_expression; /* 0: register and offset */
};

struct entry {
    uintptr_t first;
    uintptr_t bytes;
    uint64_t code_factor;
    int64_t data_factor;
    bool is_signal;
    struct reader common;   /* the instructions of the common part */
    struct reader specific; /* and of the function */
};

/* One entry of .eh_frame: its body, and where that starts. False at the end. */
static bool open_entry(uintptr_t at, uintptr_t end, struct reader *body) {
    struct reader reader = {.at = at, .end = end};
    uint64_t length = read_bytes(&reader, 4);
    if (length == 0xffffffff) {
        length = read_bytes(&reader, 8);
    }
    if (reader.bad || length == 0 || reader.end - reader.at < length) {
        return false;
    }
    *body = (struct reader){.at = reader.at, .end = reader.at + length};
    return true;
}

/* The common part (CIE): version, augmentation, factors. */
static bool read_common(uintptr_t at, uintptr_t end, uintptr_t tables, struct entry *entry,
                        unsigned *encoding, bool *augmented) {
    struct reader reader;
    if (!open_entry(at, end, &reader) || read_bytes(&reader, 4) != 0) {
        return false;
    }
    uint64_t version = read_bytes(&reader, 1);
    char augmentation[8] = {0};
    size_t letters = 0;
    for (char letter; (letter = (char)read_bytes(&reader, 1)) != '\0' && !reader.bad;) {
        if (letters == sizeof augmentation - 1) {
            return false;
        }
        augmentation[letters++] = letter;
    }
    entry->code_factor = read_uleb(&reader);
    entry->data_factor = read_sleb(&reader);
    uint64_t return_column = version == 1 ? read_bytes(&reader, 1) : read_uleb(&reader);
    *encoding = FORM_ABSOLUTE;
    *augmented = augmentation[0] == 'z';
    if ((version != 1 && version != 3) || return_column != CFI_RIP || (letters > 0 && !*augmented)) {
        return false;
    }
    if (*augmented) {
        uint64_t length = read_uleb(&reader);
        struct reader data = {.at = reader.at, .end = reader.end};
        skip(&reader, length);
        for (size_t i = 1; i < letters; i++) {
            switch (augmentation[i]) {
            case 'R':
                *encoding = (unsigned)read_bytes(&data, 1);
                break;
            case 'L':
                read_bytes(&data, 1);
                break;
            case 'P': {
                unsigned form = (unsigned)read_bytes(&data, 1);
                read_pointer(&data, form & 0x7f, tables);
                break;
            }
            case 'S':
                entry->is_signal = true;
                break;
            default:
                return false;
            }
        }
        if (data.bad) {
            return false;
        }
    }
    entry->common = reader;
    return !reader.bad;
}

/* The function's part (FDE) at an address. */
static bool read_entry(const struct cfi_module *module, uintptr_t at, struct entry *entry) {
    struct reader reader;
    *entry = (struct entry){0};
    if (at < module->start || !open_entry(at, module->end, &reader)) {
        return false;
    }
    uintptr_t place = reader.at;
    uint64_t back = read_bytes(&reader, 4);
    unsigned encoding;
    bool augmented;
    if (back == 0 || back > place - module->start ||
        !read_common(place - back, module->end, module->tables, entry, &encoding, &augmented)) {
        return false;
    }
    entry->first = read_pointer(&reader, encoding, module->tables);
    entry->bytes = read_pointer(&reader, encoding & 0x0f, module->tables);
    if (augmented) {
        skip(&reader, read_uleb(&reader));
    }
    entry->specific = reader;
    return !reader.bad;
}

/* By the table that the linker sorted. */
static bool find_entry(const struct cfi_module *module, uintptr_t address, struct entry *entry) {
    struct reader reader = {.at = module->tables, .end = module->end};
    if (module->tables < module->start || read_bytes(&reader, 1) != 1) {
        return false;
    }
    unsigned frame_form = (unsigned)read_bytes(&reader, 1);
    unsigned count_form = (unsigned)read_bytes(&reader, 1);
    unsigned table_form = (unsigned)read_bytes(&reader, 1);
    read_pointer(&reader, frame_form, module->tables);
    uint64_t count = read_pointer(&reader, count_form, module->tables);
    if (reader.bad || table_form != (RELATIVE_TO_TABLES | FORM_S4) || count_form == FORM_OMITTED ||
        count == 0 || count > (module->end - reader.at) / 8) {
        return false;
    }
    uintptr_t table = reader.at;
    uint64_t low = 0;
    uint64_t high = count;
    int32_t pair[2];
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        memcpy(pair, (const void *)(table + middle * sizeof pair), sizeof pair);
        if (module->tables + (uintptr_t)(intptr_t)pair[0] <= address) {
            low = middle;
        } else {
            high = middle;
        }
    }
    memcpy(pair, (const void *)(table + low * sizeof pair), sizeof pair);
    return read_entry(module, module->tables + (uintptr_t)(intptr_t)pair[1], entry) &&
           address - entry->first < entry->bytes;
}

static void set_rule(struct rules *rules, uint64_t number, enum rule_kind kind, int64_t value) {
    if (number < CFI_REGISTERS) {
        rules->of[number] = (struct rule){kind, value};
    }
}

/* An expression is where it stands: its length and its bytes are passed over. */
static uintptr_t pass_expression(struct reader *reader) {
    uintptr_t at = reader->at;
    skip(reader, read_uleb(reader));
    return at;
}

/* Compilers nest them once; and the stack this runs on may be a small one. */
#define REMEMBERED_MOST 4

/*
 * Runs instructions until they speak of what is behind the address. initial: the rules as the common part
 * leaves them, to be restored. False if there is one that is not known.
 */
static bool run(const struct entry *entry, struct reader reader, uintptr_t address,
                const struct rules *initial, struct rules *rules) {
    struct rules remembered[REMEMBERED_MOST];
    size_t depth = 0;
    uintptr_t location = entry->first;
    while (reader.at < reader.end && !reader.bad) {
        unsigned code = (unsigned)read_bytes(&reader, 1);
        unsigned low = code & 0x3f;
        uint64_t number;
        switch (code >> 6 != 0 ? code & 0xc0 : code) {
        case 0x40: /* advance_loc, and with 1, 2 and 4 bytes */
            location += low * entry->code_factor;
            break;
        case 0x02:
            location += read_bytes(&reader, 1) * entry->code_factor;
            break;
        case 0x03:
            location += read_bytes(&reader, 2) * entry->code_factor;
            break;
        case 0x04:
            location += read_bytes(&reader, 4) * entry->code_factor;
            break;
        case 0x80: /* offset */
            set_rule(rules, low, RULE_AT_OFFSET, (int64_t)read_uleb(&reader) * entry->data_factor);
            break;
        case 0x05: /* offset_extended */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_AT_OFFSET, (int64_t)read_uleb(&reader) * entry->data_factor);
            break;
        case 0x11: /* offset_extended_sf */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_AT_OFFSET, read_sleb(&reader) * entry->data_factor);
            break;
        case 0xc0: /* restore */
            if (low < CFI_REGISTERS) {
                rules->of[low] = initial->of[low];
            }
            break;
        case 0x06: /* restore_extended */
            number = read_uleb(&reader);
            if (number < CFI_REGISTERS) {
                rules->of[number] = initial->of[number];
            }
            break;
        case 0x00:
            break; /* nop */
        case 0x07:
            set_rule(rules, read_uleb(&reader), RULE_UNDEFINED, 0);
            break;
        case 0x08:
            set_rule(rules, read_uleb(&reader), RULE_SAME, 0);
            break;
        case 0x09: /* register */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_REGISTER, (int64_t)read_uleb(&reader));
            break;
        case 0x0a: /* remember_state */
            if (depth == REMEMBERED_MOST) {
                return false;
            }
            remembered[depth++] = *rules;
            break;
        case 0x0b: /* restore_state */
            if (depth == 0) {
                return false;
            }
            *rules = remembered[--depth];
            break;
        case 0x0c: /* def_cfa */
            rules->frame_register = (unsigned)read_uleb(&reader);
            rules->frame_offset = (int64_t)read_uleb(&reader);
            rules->frame_expression = 0;
            break;
        case 0x12: /* def_cfa_sf */
            rules->frame_register = (unsigned)read_uleb(&reader);
            rules->frame_offset = read_sleb(&reader) * entry->data_factor;
            rules->frame_expression = 0;
            break;
        case 0x0d: /* def_cfa_register */
            rules->frame_register = (unsigned)read_uleb(&reader);
            rules->frame_expression = 0;
            break;
        case 0x0e:
            rules->frame_offset = (int64_t)read_uleb(&reader);
            break;
        case 0x13:
            rules->frame_offset = read_sleb(&reader) * entry->data_factor;
            break;
        case 0x0f:
            rules->frame_expression = pass_expression(&reader);
            break;
        case 0x10: /* expression */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_AT_EXPRESSION, (int64_t)pass_expression(&reader));
            break;
        case 0x16: /* val_expression */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_IS_EXPRESSION, (int64_t)pass_expression(&reader));
            break;
        case 0x14: /* val_offset */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_IS_OFFSET, (int64_t)read_uleb(&reader) * entry->data_factor);
            break;
        case 0x15: /* val_offset_sf */
            number = read_uleb(&reader);
            set_rule(rules, number, RULE_IS_OFFSET, read_sleb(&reader) * entry->data_factor);
            break;
        case 0x2e:
            read_uleb(&reader);
            break; /* GNU_args_size */
        default:
            return false;
        }
        if (location > address) {
            return true;
        }
    }
    return !reader.bad;
}

#define OPERANDS_MOST 16

/* The few operations that linkers and C libraries use: for signal frames and for calls through tables. */
static bool evaluate(const struct cfi_module *module, uintptr_t expression,
                     const struct cfi_registers *registers, bool with_frame, uintptr_t frame, cfi_load load,
                     void *context, uintptr_t *value) {
    struct reader reader = {.at = expression, .end = module->end};
    uint64_t length = read_uleb(&reader);
    if (reader.bad || reader.end - reader.at < length) {
        return false;
    }
    reader.end = reader.at + length;
    uintptr_t operands[OPERANDS_MOST + 2] = {0, 0, frame};
    /* Two below the lowest: an operation on too few finds zeros there, and is found out after it. */
    size_t top = with_frame ? 3 : 2;
    while (reader.at < reader.end) {
        unsigned code = (unsigned)read_bytes(&reader, 1);
        uintptr_t last = operands[top - 1];
        uintptr_t before = operands[top - 2];
        if (code >= 0x30 && code <= 0x4f) { /* lit */
            operands[top++] = code - 0x30;
        } else if (code >= 0x70 && code <= 0x70 + CFI_RIP) { /* breg */
            operands[top++] = registers->of[code - 0x70] + (uintptr_t)read_sleb(&reader);
        } else {
            switch (code) {
            case 0x06: /* deref */
                if (!load(context, last, &operands[top - 1])) {
                    return false;
                }
                break;
            case 0x08:
                operands[top++] = read_bytes(&reader, 1);
                break; /* const1u */
            case 0x09:
                operands[top++] = (uintptr_t)(intptr_t)(int8_t)read_bytes(&reader, 1);
                break; /* const1s */
            case 0x0a:
                operands[top++] = read_bytes(&reader, 2);
                break; /* const2u */
            case 0x10:
                operands[top++] = read_uleb(&reader);
                break; /* constu */
            case 0x11:
                operands[top++] = (uintptr_t)read_sleb(&reader);
                break; /* consts */
            case 0x1a:
                operands[--top - 1] = before & last;
                break;
            case 0x1c:
                operands[--top - 1] = before - last;
                break;
            case 0x22:
                operands[--top - 1] = before + last;
                break;
            case 0x23:
                operands[top - 1] = last + read_uleb(&reader);
                break; /* plus_uconst */
            case 0x24:
                operands[--top - 1] = last < 64 ? before << last : 0;
                break; /* shl */
            case 0x2a:
                operands[--top - 1] = (intptr_t)before >= (intptr_t)last;
                break; /* ge */
            default:
                return false;
            }
        }
        if (reader.bad || top < 3 || top == OPERANDS_MOST + 2) {
            return false;
        }
    }
    *value = operands[top - 1];
    return top >= 3;
}

static bool find_frame(const struct cfi_module *module, const struct rules *rules,
                       const struct cfi_registers *registers, cfi_load load, void *context,
                       uintptr_t *frame) {
    if (rules->frame_expression != 0) {
        return evaluate(module, rules->frame_expression, registers, false, 0, load, context, frame);
    }
    if (rules->frame_register >= CFI_REGISTERS) {
        return false;
    }
    *frame = registers->of[rules->frame_register] + (uintptr_t)rules->frame_offset;
    return true;
}

static bool find_register(const struct cfi_module *module, const struct rule *rule, unsigned number,
                          const struct cfi_registers *registers, uintptr_t frame, cfi_load load,
                          void *context, uintptr_t *value) {
    uintptr_t address;
    switch (rule->kind) {
    case RULE_AT_OFFSET:
        return load(context, frame + (uintptr_t)rule->value, value);
    case RULE_IS_OFFSET:
        *value = frame + (uintptr_t)rule->value;
        return true;
    case RULE_AT_EXPRESSION:
        return evaluate(module, (uintptr_t)rule->value, registers, true, frame, load, context, &address) &&
               load(context, address, value);
    case RULE_IS_EXPRESSION:
        return evaluate(module, (uintptr_t)rule->value, registers, true, frame, load, context, value);
    case RULE_REGISTER:
        if (rule->value < 0 || rule->value >= CFI_REGISTERS) {
            return false;
        }
        *value = registers->of[rule->value];
        return true;
    case RULE_SAME:
    case RULE_UNDEFINED:
        break;
    }
    /* Without a rule the stack pointer is the frame's address, by definition. */
    *value = number == CFI_RSP ? frame : registers->of[number];
    return true;
}

enum cfi_step cfi_step(const struct cfi_module *module, struct cfi_registers *registers, cfi_load load,
                       void *context) {
    /* A call that is its function's last instruction returns to where the next function begins. */
    uintptr_t address = registers->of[CFI_RIP] - (registers->in_signal ? 0 : 1);
    struct entry entry;
    if (!find_entry(module, address, &entry)) {
        return CFI_UNKNOWN;
    }
    struct rules initial = {0};
    if (!run(&entry, entry.common, UINTPTR_MAX, &initial, &initial)) {
        return CFI_UNKNOWN;
    }
    struct rules rules = initial;
    if (!run(&entry, entry.specific, address, &initial, &rules)) {
        return CFI_UNKNOWN;
    }
    if (rules.of[CFI_RIP].kind == RULE_UNDEFINED) {
        return CFI_OUTERMOST;
    }
    uintptr_t frame;
    struct cfi_registers caller = {.in_signal = entry.is_signal};
    if (rules.of[CFI_RIP].kind == RULE_SAME ||
        !find_frame(module, &rules, registers, load, context, &frame)) {
        return CFI_UNKNOWN;
    }
    for (unsigned number = 0; number < CFI_REGISTERS; number++) {
        if (!find_register(module, &rules.of[number], number, registers, frame, load, context,
                           &caller.of[number])) {
            return CFI_UNKNOWN;
        }
    }
    *registers = caller;
    return CFI_STEPPED;
}
