/* GET /metrics: load, memory and disk of the whole guest. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "http.h"

struct metrics {
	uint64_t busy, total; /* clock ticks at the last call, 0 before the first: then the mean since boot is given */
	double used_pct;
};

/* First line of /proc/stat: user nice system idle iowait irq softirq steal (guest time is part of user). */
static bool read_cpu(uint64_t *busy, uint64_t *total)
{
	unsigned long long t[8] = {0};
	FILE *file = fopen("/proc/stat", "re");
	int n, i;

	if (!file)
		return false;
	n = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6],
		   &t[7]);
	fclose(file);
	if (n < 4)
		return false;
	*total = 0;
	for (i = 0; i < 8; i++)
		*total += t[i];
	*busy = *total - t[3] - t[4];
	return true;
}

static double cpu_used_pct(struct metrics *metrics)
{
	uint64_t busy, total;

	if (!read_cpu(&busy, &total))
		return 0;
	if (total > metrics->total && busy >= metrics->busy) { /* two calls within a tick: the same answer again */
		metrics->used_pct = (double)(10000 * (busy - metrics->busy) / (total - metrics->total)) / 100;
		metrics->busy = busy;
		metrics->total = total;
	}
	return metrics->used_pct;
}

struct memory {
	uint64_t total, available, cached; /* bytes */
};

static struct memory read_memory(void)
{
	struct memory memory = {0};
	FILE *file = fopen("/proc/meminfo", "re");
	char line[128];

	while (file && fgets(line, sizeof line, file)) {
		unsigned long long kib;

		if (sscanf(line, "MemTotal: %llu", &kib) == 1)
			memory.total = kib * 1024;
		else if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
			memory.available = kib * 1024;
		else if (sscanf(line, "Cached: %llu", &kib) == 1)
			memory.cached = kib * 1024;
	}
	if (file)
		fclose(file);
	if (memory.available > memory.total)
		memory.available = memory.total;
	return memory;
}

static void metrics(struct http_request *req)
{
	struct memory memory = read_memory();
	uint64_t used = memory.total - memory.available;
	struct statvfs disk = {0};

	if (statvfs("/", &disk) < 0)
		memset(&disk, 0, sizeof disk);
	http_add_header(req, "Cache-Control", "no-store");
	http_reply_json(
		req, 200,
		json_pack("{s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
			  "ts", (json_int_t)time(NULL),
			  "cpu_count", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN),
			  "cpu_used_pct", cpu_used_pct(req->envd->metrics),
			  "mem_total", (json_int_t)memory.total,
			  "mem_used", (json_int_t)used,
			  "mem_cache", (json_int_t)memory.cached,
			  "mem_total_mib", (json_int_t)(memory.total >> 20),
			  "mem_used_mib", (json_int_t)(used >> 20),
			  "disk_used", (json_int_t)((disk.f_blocks - disk.f_bfree) * disk.f_frsize),
			  "disk_total", (json_int_t)(disk.f_blocks * disk.f_frsize)));
}

void metrics_register(struct envd *envd)
{
	envd->metrics = calloc(1, sizeof *envd->metrics);
	if (!envd->metrics)
		abort();
	http_route(envd, "GET", "/metrics", HTTP_TOKEN, metrics);
}
