/* What the plugin uses of QEMU's interface for TCG plugins, version 1 (QEMU 4.2 to 8.2 and, for the same
 * names, later ones that still accept it). Debian packages no header, so these are declared from the
 * documentation. */
#ifndef CALM_TRACE_QEMU_PLUGIN_H
#define CALM_TRACE_QEMU_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QEMU_PLUGIN_EXPORT __attribute__((visibility("default")))

enum { QEMU_PLUGIN_INTERFACE = 1 };

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;

struct qemu_plugin_tb;   /* instructions that are translated together */
struct qemu_plugin_insn; /* one of them */

enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
enum qemu_plugin_mem_rw { QEMU_PLUGIN_MEM_R = 1, QEMU_PLUGIN_MEM_W, QEMU_PLUGIN_MEM_RW };

/* What QEMU looks up in the plugin. The info says about the guest what is not needed here. */
extern QEMU_PLUGIN_EXPORT int qemu_plugin_version;
QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv);

typedef void (*qemu_plugin_translated_t)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
typedef void (*qemu_plugin_executed_t)(unsigned int vcpu, void *data);
typedef void (*qemu_plugin_accessed_t)(unsigned int vcpu, qemu_plugin_meminfo_t info, uint64_t address,
                                       void *data);
typedef void (*qemu_plugin_vcpu_t)(qemu_plugin_id_t id, unsigned int vcpu);
typedef void (*qemu_plugin_called_t)(qemu_plugin_id_t id, unsigned int vcpu, int64_t number, uint64_t a1,
                                     uint64_t a2, uint64_t a3, uint64_t a4, uint64_t a5, uint64_t a6,
                                     uint64_t a7, uint64_t a8);
typedef void (*qemu_plugin_returned_t)(qemu_plugin_id_t id, unsigned int vcpu, int64_t number,
                                       int64_t result);
typedef void (*qemu_plugin_ended_t)(qemu_plugin_id_t id, void *data);

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, qemu_plugin_translated_t callback);
void qemu_plugin_register_vcpu_exit_cb(qemu_plugin_id_t id, qemu_plugin_vcpu_t callback);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t id, qemu_plugin_called_t callback);
void qemu_plugin_register_vcpu_syscall_ret_cb(qemu_plugin_id_t id, qemu_plugin_returned_t callback);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, qemu_plugin_ended_t callback, void *data);

/* While a block is being translated: what is called each time that it is run. */
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, qemu_plugin_executed_t callback,
                                          enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, qemu_plugin_executed_t callback,
                                            enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn, qemu_plugin_accessed_t callback,
                                      enum qemu_plugin_cb_flags flags, enum qemu_plugin_mem_rw rw,
                                      void *data);

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *insn); /* in QEMU's own process */

unsigned int qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t info); /* the size is 1 << this */
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info);

#endif
