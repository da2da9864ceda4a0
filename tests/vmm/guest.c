/* PID 1 of a guest that is told what to do by the first sector of its disk, and answers on the console. Each round it
 * prints "round N: COMMAND" when the command has changed, N being a counter in its memory. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char *arena;

static void load_modules(void) {
  char list[4096] = {0};
  int fd = open("/modules.list", O_RDONLY);
  if (read(fd, list, sizeof list - 1) < 0) return;
  for (char *save, *path = strtok_r(list, "\n", &save); path; path = strtok_r(NULL, "\n", &save)) {
    int module = open(path, O_RDONLY);
    syscall(SYS_finit_module, module, "", 0);
    close(module);
  }
}

static void fill(int mib, unsigned seed) {
  unsigned *words = (unsigned *)arena;
  for (size_t i = 0; i < (size_t)mib << 18; i++) words[i] = seed = seed * 1664525u + 1013904223u;
}

/* Sum of the arena, so that the host can compare content before and after. */
static unsigned sum(int mib) {
  unsigned *words = (unsigned *)arena, total = 0;
  for (size_t i = 0; i < (size_t)mib << 18; i++) total = total * 31 + words[i];
  return total;
}

static void obey(const char *command, int disk, char *sector) {
  int mib = atoi(command + 5);
  if (!strncmp(command, "FILL ", 5)) fill(mib, 7);
  if (!strncmp(command, "ZERO ", 5)) memset(arena, 0, (size_t)mib << 20);
  if (!strncmp(command, "SUM  ", 5)) printf("sum %u\n", sum(mib));
  if (!strncmp(command, "SAVE ", 5)) {
    memset(sector, 0, 512);
    snprintf(sector, 512, "saved %d", mib);
    if (pwrite(disk, sector, 512, 1 << 20) == 512) printf("saved %d\n", mib);
  }
  if (!strncmp(command, "SHOW ", 5)) {
    if (pread(disk, sector, 512, 1 << 20) == 512) printf("shown %.20s\n", sector);
  }
  if (!strncmp(command, "TRIM ", 5)) {
    uint64_t range[2] = {2 << 20, (uint64_t)mib << 20};
    if (!ioctl(disk, BLKDISCARD, range)) printf("trimmed %d\n", mib);
  }
  if (!strncmp(command, "FLOOD", 5))
    for (;;) puts("the quick brown fox jumps over the lazy dog");
  if (!strncmp(command, "HALT ", 5)) reboot(RB_AUTOBOOT);
  if (!strncmp(command, "PANIC", 5)) exit(1);
}

int main(void) {
  load_modules();
  mkdir("/dev", 0755);
  mount("devtmpfs", "/dev", "devtmpfs", 0, "");
  arena = mmap(NULL, 96 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *sector = aligned_alloc(4096, 4096), last[32] = "";
  int disk = -1;
  while (disk < 0) disk = open("/dev/vda", O_RDWR | O_DIRECT);
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  for (long n = 0;; n++) {
    char command[32] = "";
    if (pread(disk, sector, 512, 0) == 512) memcpy(command, sector, sizeof command - 1);
    if (strcmp(command, last)) {
      strcpy(last, command);
      obey(command, disk, sector);
      printf("round %ld: %s\n", n, command);
    }
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    nanosleep(&pause, NULL);
  }
}
