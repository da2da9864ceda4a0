/* The program of the KVM probe (probe.py): real mode, protected mode, long mode with paging, then 50 million
 * instructions and some that make a virtual machine exit. A processor with hardware virtualisation does that in a
 * fraction of a second; a KVM that emulates the guest needs minutes. It ends by writing 42 to the isa-debug-exit device.
 *
 * as --64 -o rom.o probe_rom.S && objcopy -O binary -j .text rom.o rom.bin   gives the bytes in probe.py.
 */
.code16
.globl _start
_start:
base:
  cli
  lgdtl %cs:(gdtr - base)
  movl %cr0, %eax
  orb $1, %al
  movl %eax, %cr0
  ljmpl $0x08, $(0xf0000 + prot - base)
.code32
prot:
  movw $0x10, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
  movl $0x8000, %esp
  /* one page table tree: first 2 MiB, identity */
  movl $0x1000, %edi
  xorl %eax, %eax
  movl $0xc00, %ecx
  cld
  rep stosl
  movl $0x2003, 0x1000
  movl $0x3003, 0x2000
  movl $0x0083, 0x3000
  movl $0x1000, %eax
  movl %eax, %cr3
  movl %cr4, %eax
  orb $0x20, %al
  movl %eax, %cr4
  movl $0xc0000080, %ecx
  rdmsr
  orw $0x100, %ax
  wrmsr
  movl %cr0, %eax
  orl $0x80000000, %eax
  movl %eax, %cr0
  ljmpl $0x18, $(0xf0000 + long - base)
.code64
long:
  movl $50000000, %ebx
0:
  decl %ebx
  jnz 0b
  movl $1000, %ecx
1:
  movl %ecx, 0x9000
  invlpg 0x9000
  loop 1b
  xorl %eax, %eax
  cpuid
  movl $42, %eax
  outl %eax, $0xf4
3:
  hlt
  jmp 3b
.balign 8
gdt:
  .quad 0
  .quad 0x00cf9b000000ffff
  .quad 0x00cf93000000ffff
  .quad 0x00af9b000000ffff
gdtr:
  .word 31
  .long 0xf0000 + gdt - base
end:
