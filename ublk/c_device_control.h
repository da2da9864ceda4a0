/* Commands on /dev/ublk-control. */
#ifndef AENV_DEVICE_CONTROL_H
#define AENV_DEVICE_CONTROL_H

#include "c_device_uapi.h"

struct control;

int control_open(struct control **out);
void control_close(struct control *control);
/* Blocks until the kernel has done it; several threads may call at a time. Gives the kernel's result, -errno or 0. */
int control_command(struct control *control, uint32_t op, struct ublk_ctrl_cmd command);

#endif
