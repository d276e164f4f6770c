/* In archives only: the object that the archive is linked into is never unloaded. */
#ifndef CALM_API_PIN_H
#define CALM_API_PIN_H

/* In a constructor, where no other thread can unload the object yet, and not within malloc: allocates. */
void pin_own_object(void);

#endif
