/* What setting an option does beyond storing its value (options.h). */
#ifndef CALM_API_SETTINGS_H
#define CALM_API_SETTINGS_H

/* Called at the start, before the arena exists. Reads the options, and applies
 * those that the arena needs. */
void settings_read(void);

/* Called once the allocator is ready. Starts the heap profile if an option
 * requests it. Reports a lack of memory for it. */
void settings_apply_profile(void);

/* Called in a constructor, not within malloc. Applies all options. If there was
 * no environment before, reads them first. */
void settings_read_late(void);

/* Sets an option once the allocator is ready. Returns 0, an error of
 * options_set, or ENOMEM. Any thread may call it. */
int settings_set(const char *name, const char *value);

#endif
