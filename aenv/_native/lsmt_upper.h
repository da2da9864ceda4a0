/* The inside of a writable layer, for those who write it and those who seal it. */
#ifndef AENV_LSMT_UPPER_H
#define AENV_LSMT_UPPER_H

#include "lsmt_journal.h"
#include "lsmt_space.h"
#include "lsmt_view.h"

struct upper {
    int data_fd, index_fd;
    int direct_fd; /* < 0: the file system has no O_DIRECT */
    char *data_path, *index_path;
    struct lsmt_header header;
    uint32_t seed;
    pthread_mutex_t append; /* data_end, records, space; held while a record is written and the map is changed */
    pthread_mutex_t flushing;
    pthread_mutex_t reserving;
    _Atomic uint64_t reserved; /* end of what is allocated ahead */
    pthread_rwlock_t lock; /* the map */
    uint64_t data_end, records, synced;
    _Atomic uint64_t virtual_size;
    atomic_bool named; /* its directory was synced: the files are found after a power loss */
    atomic_int failed; /* errno of a failed flush: what is on disk is unknown from then on */
    bool frozen;
    struct map map;
    struct space space;
    struct view view;
};

int sync_directory(const char *path); /* the one that the file is in */

#endif
