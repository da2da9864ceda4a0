/* Removal of a file or of a whole tree. */
#ifndef ENVD_REMOVE_H
#define ENVD_REMOVE_H

/* Removes `path` and all below it. Symbolic links are removed, never followed, even when somebody exchanges a directory
 * for a link meanwhile. A missing path is success. -1 with errno at the first thing that cannot be removed; what was
 * removed before stays so. */
int remove_all(const char *path);

#endif
