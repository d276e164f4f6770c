/* What setting an option does beyond storing its value (options.h). */
#ifndef CALM_API_SETTINGS_H
#define CALM_API_SETTINGS_H

/* At the start, before the governor is there: reads the options, and applies those that it needs. */
void settings_read(void);

/* Once the allocator is ready: starts the profile that was asked for. Reports it if there is no memory for
 * one. */
void settings_apply_profile(void);

/* In a constructor, not within malloc: reads the options if there was no environment, and applies all. */
void settings_read_late(void);

/* Sets an option, once the allocator is ready. Returns 0, an errno as options_set, or ENOMEM. Any thread. */
int settings_set(const char *name, const char *value);

#endif
