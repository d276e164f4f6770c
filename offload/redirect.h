/*
 * Included before each source of src/api when it is compiled for
 * libcalmoffload: what src/api calls of the heap and its threads becomes what
 * offload.c has in its place. src/ itself knows nothing of it.
 */
#ifndef CALM_OFFLOAD_REDIRECT_H
#define CALM_OFFLOAD_REDIRECT_H

#define cpu_caches_start     offload_caches_start
#define arena_after_fork     offload_after_fork
#define arena_before_fork    offload_before_fork
#define arena_cached         offload_cached
#define helper_end           offload_end
#define arena_init           offload_init
#define arena_is_held        offload_is_held
#define arena_max_cached     offload_max_cached
#define arena_put_blocks     offload_put_blocks
#define arena_put_large      offload_put_large
#define arena_start_child    offload_start_child
#define arena_take_blocks    offload_take_blocks
#define arena_take_large     offload_take_large
#define arena_trim           offload_trim
#define arena_trim_by_helper offload_trim_by_helper
#define helper_exists        offload_helper_exists
#define helper_stop          offload_stop_threads

#endif
