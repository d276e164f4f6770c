/* In archives only: the object that contains the archive is never unloaded. */
#ifndef CALM_API_PIN_H
#define CALM_API_PIN_H

/* Called in a constructor, where no other thread can unload the object yet.
 * Must not be called within malloc, because it allocates. */
void pin_own_object(void);

#endif
